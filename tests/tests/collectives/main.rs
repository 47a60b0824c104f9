//! All-reduces and transfers between real processes, and what becomes of a group when
//! one of them fails.

mod ranks;
mod reduce;
