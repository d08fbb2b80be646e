//! What a person reads.

use std::io::{self, Write};

/// Writes a line to standard output. A reader that has gone away is no error.
pub(crate) fn say(line: &str) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}

/// Writes an error to standard error, on one line, and whose it is where each rank is a process.
pub(crate) fn complain(error: &dyn std::error::Error, rank: Option<&str>) {
    let whose = rank.map(|rank| format!("rank {rank}: ")).unwrap_or_default();
    let message = printable(format!("{whose}error: {error}").replace('\n', " ").as_bytes());
    let _ = writeln!(io::stderr().lock(), "{message}");
}

/// Text that a terminal shows as it is: bytes that are not printable text become dots.
pub(crate) fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| match c {
            '\n' => '\n',
            c if c.is_control() || c == char::REPLACEMENT_CHARACTER => '·',
            c => c,
        })
        .collect()
}

/// A number with thousands separated.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn unprintable_bytes_become_dots() {
        assert_eq!(printable(b"a\x1b[31m\n\xffb"), "a·[31m\n·b");
    }
}
