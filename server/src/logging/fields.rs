//! Formats an event's fields like the subscriber's default, but escaped and cut.

use std::fmt::{self, Debug, Write};

use tensord_proto::text::{EscapingWriter, MESSAGE_CHARS};
use tracing::field::{Field, Visit};
use tracing_subscriber::{
    field::RecordFields,
    fmt::{FormatFields, format::Writer},
};

/// Writes `message name=value name=value`.
#[derive(Clone, Copy, Debug)]
pub(super) struct EscapedFields;

impl<'writer> FormatFields<'writer> for EscapedFields {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: Writer<'writer>,
        fields: R,
    ) -> fmt::Result {
        let mut line = FieldWriter {
            writer: &mut writer,
            is_empty: true,
            result: Ok(()),
        };
        fields.record(&mut line);
        line.result
    }
}

struct FieldWriter<'a, 'writer> {
    writer: &'a mut Writer<'writer>,
    is_empty: bool,
    result: fmt::Result,
}

impl FieldWriter<'_, '_> {
    fn put(&mut self, field: &Field, value: &dyn Debug) -> fmt::Result {
        if !std::mem::replace(&mut self.is_empty, false) {
            self.writer.write_char(' ')?;
        }
        match (field.name(), self.writer.has_ansi_escapes()) {
            ("message", _) => {}
            // The name is italic and the `=` dim, as in the subscriber's default format.
            (name, true) => write!(self.writer, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?,
            (name, false) => write!(self.writer, "{name}=")?,
        }
        write!(EscapingWriter::new(self.writer, MESSAGE_CHARS), "{value:?}")
    }
}

impl Visit for FieldWriter<'_, '_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if self.result.is_ok() {
            self.result = self.put(field, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use tracing::info;

    use super::*;

    #[derive(Clone, Default)]
    struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(ansi: bool, event: impl FnOnce()) -> String {
        let log = SharedBuffer::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .fmt_fields(EscapedFields)
            .with_ansi(ansi)
            .without_time()
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, event);
        let log = log.0.lock().unwrap();
        String::from_utf8(log.clone()).unwrap()
    }

    #[test]
    fn field_values_cannot_break_a_line() {
        let name = "x\n2026 INFO forged\u{1b}[2J";
        let line = logged(
            false,
            || info!(peer = %name, quoted = name, "worker {name} joined"),
        );
        assert!(
            line.ends_with(
                "worker x\\n2026 INFO forged\\u{1b}[2J joined peer=x\\n2026 INFO forged\\u{1b}[2J quoted=\"x\\n2026 INFO forged\\u{1b}[2J\"\n"
            ),
            "{line}"
        );
        assert_eq!(line.lines().count(), 1);
        let long = "y".repeat(3 << 20);
        let line = logged(false, || info!(%long, "{long}"));
        assert!(line.len() < 3 * MESSAGE_CHARS && line.contains('…'));
    }

    #[test]
    fn only_field_names_are_coloured() {
        let line = logged(true, || info!(peer = %"\u{1b}[31mred", "here"));
        assert!(
            line.contains("\x1b[3mpeer\x1b[0m\x1b[2m=\x1b[0m\\u{1b}[31mred"),
            "{line:?}"
        );
    }
}
