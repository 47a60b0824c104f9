//! Makes a peer's text safe for logs, errors and terminals.
//!
//! A peer may put anything in a name or a reason: line breaks that forge log lines,
//! escape sequences that a terminal executes, marks that change the direction of writing,
//! or megabytes. All code that shows such text must use [`sanitize`].

use std::fmt::{self, Write};

/// Maximum number of characters shown of a name or a version.
pub const NAME_CHARS: usize = 200;

/// Maximum number of characters shown of an explanation.
pub const MESSAGE_CHARS: usize = 2000;

/// Maximum number of lines shown of why something waits.
pub const MAX_EXPLANATION_LINES: usize = 64;

/// Returns `text` in a form that is safe to show: control characters escaped, at most
/// `chars` characters.
pub fn sanitize(text: &str, chars: usize) -> impl fmt::Display {
    fmt::from_fn(move |f| EscapingWriter::new(f, chars).write_str(text))
}

/// Returns whether a character could change how the text around it is shown.
fn is_active(c: char) -> bool {
    // Marks of direction, line and paragraph separators, and characters without width, in
    // addition to Unicode's control characters.
    let is_mark = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    c.is_control() || is_mark
}

/// Writes text with control characters escaped, up to a number of characters. The first
/// character over the limit is replaced by `…`; the rest is dropped.
pub struct EscapingWriter<'a, W: ?Sized> {
    to: &'a mut W,
    left: usize,
    is_cut: bool,
}

impl<'a, W: Write + ?Sized> EscapingWriter<'a, W> {
    /// Creates a writer that passes at most `chars` characters on to `to`.
    pub fn new(to: &'a mut W, chars: usize) -> Self {
        Self {
            to,
            left: chars,
            is_cut: false,
        }
    }
}

impl<W: Write + ?Sized> Write for EscapingWriter<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if self.left == 0 {
                return match std::mem::replace(&mut self.is_cut, true) {
                    true => Ok(()),
                    false => self.to.write_char('…'),
                };
            }
            self.left -= 1;
            match is_active(c) {
                true => write!(self.to, "{}", c.escape_default())?,
                false => self.to.write_char(c)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_control_characters_are_escaped() {
        let cases = [
            ("gpu-1 (Zürich) 雪 \\ \"x\"", "gpu-1 (Zürich) 雪 \\ \"x\""),
            ("a\nINFO forged\r\n", "a\\nINFO forged\\r\\n"),
            ("\u{1b}[2J\u{7}\0", "\\u{1b}[2J\\u{7}\\u{0}"),
            ("\u{85}\u{9b}31m", "\\u{85}\\u{9b}31m"),
            (
                "\u{202e}txt\u{2066}\u{2028}\u{feff}",
                "\\u{202e}txt\\u{2066}\\u{2028}\\u{feff}",
            ),
        ];
        for (text, shown) in cases {
            assert_eq!(sanitize(text, NAME_CHARS).to_string(), shown);
        }
    }

    #[test]
    fn long_text_is_truncated_once() {
        assert_eq!(sanitize("abc", 3).to_string(), "abc");
        assert_eq!(sanitize("abcd", 3).to_string(), "abc…");
        assert_eq!(sanitize(&"\n".repeat(3 << 20), 2).to_string(), "\\n\\n…");
        let mut shown = String::new();
        let mut escaping = EscapingWriter::new(&mut shown, 4);
        for part in ["ab", "-", "cd", "-ef"] {
            escaping.write_str(part).unwrap();
        }
        assert_eq!(shown, "ab-c…");
    }
}
