//! All-reduces and transfers between real processes, and the effect of a failed member on
//! its group.

mod ranks;
mod reduce;
