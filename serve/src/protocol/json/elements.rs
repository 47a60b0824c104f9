//! The elements of a tensor in JSON, parsed straight into little-endian bytes.
//!
//! The text is that of a `RawValue`, so it is valid JSON, and only its tokens must be recognised. There is no recursion, however deep the lists are, and never more bytes than the shape has.

use burn::tensor::{bf16, f16};

use crate::protocol::checks::{Declared, shown};
use crate::{error::InferError, protocol::DataType};

/// Parses the field `data` of an input: a flat list in row-major order, or lists that are nested as the shape is.
pub(super) fn parse(declared: &Declared, json: &str) -> Result<Vec<u8>, InferError> {
    // An element takes at least two characters with its comma, so a short text does not get much memory by a large shape.
    let most_bytes = (json.len() / 2 + 1).saturating_mul(declared.datatype.size());
    let mut bytes = Vec::with_capacity(declared.len_bytes.min(most_bytes));
    let flat = [declared.elements()];
    let mut lists = Lists {
        declared,
        sizes: if is_nested(json) {
            &declared.shape
        } else {
            &flat
        },
        counts: Vec::new(),
    };
    let mut index = 0;
    for token in Tokens(json) {
        match token {
            Token::Open => lists.open()?,
            Token::Close => lists.close()?,
            Token::Scalar(text) => {
                lists.element(text)?;
                append(declared.datatype, text, &mut bytes)
                    .ok_or_else(|| declared.invalid_element(index, text))?;
                // There is an error at the end of a list that is too long; until then, its elements are only counted.
                bytes.truncate(declared.len_bytes);
                index += 1;
            }
        }
    }
    Ok(bytes)
}

/// Returns whether a JSON value is a list whose first item is a list.
fn is_nested(json: &str) -> bool {
    let mut tokens = Tokens(json);
    matches!(
        (tokens.next(), tokens.next()),
        (Some(Token::Open), Some(Token::Open))
    )
}

/// The lists that are open at a place in `data`.
struct Lists<'a> {
    declared: &'a Declared,
    /// How many items a list has, by its depth.
    sizes: &'a [usize],
    /// How many items the open lists have so far.
    counts: Vec<usize>,
}

impl Lists<'_> {
    fn open(&mut self) -> Result<(), InferError> {
        let shape = &self.declared.shape;
        if self.counts.len() == self.sizes.len() {
            let problem =
                format!("`data` is nested more deeply than the shape {shape:?} has dimensions");
            return Err(self.declared.invalid(&problem));
        }
        if let Some(count) = self.counts.last_mut() {
            *count += 1;
        }
        self.counts.push(0);
        Ok(())
    }

    fn element(&mut self, text: &str) -> Result<(), InferError> {
        let depth = self.counts.len();
        match self.counts.last_mut() {
            Some(count) if depth == self.sizes.len() => {
                *count += 1;
                Ok(())
            }
            Some(_) => {
                let (place, shape) = (place(&self.counts[..depth - 1]), &self.declared.shape);
                let problem = format!(
                    "`{place}` has the element {}, and by the shape {shape:?} it must have lists",
                    shown(text)
                );
                Err(self.declared.invalid(&problem))
            }
            None => Err(self
                .declared
                .invalid(&format!("`data` is {}, and must be a list", shown(text)))),
        }
    }

    fn close(&mut self) -> Result<(), InferError> {
        let count = self.counts.pop().unwrap_or_default();
        let size = self
            .sizes
            .get(self.counts.len())
            .copied()
            .unwrap_or_default();
        if count == size {
            return Ok(());
        }
        let (place, shape) = (place(&self.counts), &self.declared.shape);
        Err(self.declared.invalid(&format!(
            "`{place}` has {count} items, and by the shape {shape:?} it must have {size}"
        )))
    }
}

/// Returns the path of the list that was opened last in lists with these counts.
fn place(counts: &[usize]) -> String {
    let mut place = String::from("data");
    for count in counts {
        place.push_str(&format!("[{}]", count.saturating_sub(1)));
    }
    place
}

/// Appends an element, or returns `None` if the type has no such value.
fn append(datatype: DataType, text: &str, to: &mut Vec<u8>) -> Option<()> {
    match datatype {
        DataType::Bool => to.push(match text {
            "true" | "1" => 1,
            "false" | "0" => 0,
            _ => return None,
        }),
        DataType::UInt8 => to.extend(integer::<u8>(text)?.to_le_bytes()),
        DataType::UInt16 => to.extend(integer::<u16>(text)?.to_le_bytes()),
        DataType::UInt32 => to.extend(integer::<u32>(text)?.to_le_bytes()),
        DataType::UInt64 => to.extend(integer::<u64>(text)?.to_le_bytes()),
        DataType::Int8 => to.extend(integer::<i8>(text)?.to_le_bytes()),
        DataType::Int16 => to.extend(integer::<i16>(text)?.to_le_bytes()),
        DataType::Int32 => to.extend(integer::<i32>(text)?.to_le_bytes()),
        DataType::Int64 => to.extend(integer::<i64>(text)?.to_le_bytes()),
        DataType::Fp16 => {
            let value = f16::from_f64(text.parse().ok()?);
            to.extend(value.is_finite().then_some(value)?.to_le_bytes());
        }
        DataType::Bf16 => {
            let value = bf16::from_f64(text.parse().ok()?);
            to.extend(value.is_finite().then_some(value)?.to_le_bytes());
        }
        DataType::Fp32 => {
            let value: f32 = text.parse().ok()?;
            to.extend(value.is_finite().then_some(value)?.to_le_bytes());
        }
        DataType::Fp64 => {
            let value: f64 = text.parse().ok()?;
            to.extend(value.is_finite().then_some(value)?.to_le_bytes());
        }
    }
    Some(())
}

fn integer<T: TryFrom<i128>>(text: &str) -> Option<T> {
    T::try_from(text.parse().ok()?).ok()
}

/// A token of valid JSON, without commas. An object is returned as one element, which every data type refuses.
enum Token<'a> {
    Open,
    Close,
    Scalar(&'a str),
}

/// The tokens of a text.
struct Tokens<'a>(&'a str);

impl<'a> Iterator for Tokens<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        let text = self.0.trim_start_matches([' ', '\t', '\n', '\r', ',']);
        let (len, token): (usize, fn(&'a str) -> Token<'a>) = match text.as_bytes().first()? {
            b'[' => (1, |_| Token::Open),
            b']' => (1, |_| Token::Close),
            b'"' => (string_len(text), Token::Scalar),
            b'{' => (text.len(), Token::Scalar),
            _ => (
                text.find([',', ']', ' ', '\t', '\n', '\r'])
                    .unwrap_or(text.len()),
                Token::Scalar,
            ),
        };
        let (head, rest) = text.split_at(len);
        self.0 = rest;
        Some(token(head))
    }
}

/// Returns the length of the string with which a text begins.
fn string_len(text: &str) -> usize {
    let mut is_escaped = true;
    let end = text.bytes().position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(text.len(), |end| end + 1)
}
