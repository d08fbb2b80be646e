//! Sizes in bytes, as they are typed and shown.

/// Suffixes and what they multiply by, largest first.
const UNITS: [(&str, usize); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Reads a whole number of bytes with a suffix of B, KiB, MiB or GiB, or none for bytes.
///
/// # Errors
///
/// What is wrong with it.
pub fn parse(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let with_unit = |(suffix, scale): &(&str, usize)| Some((text.strip_suffix(suffix)?, *scale));
    let (number, scale) = UNITS.iter().find_map(with_unit).unwrap_or((text, 1));
    let number = number.trim_end();
    let bytes = number.parse::<usize>().ok().and_then(|number| number.checked_mul(scale));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| {
        format!("`{text}` is no size; write a whole number above 0 and B, KiB, MiB or GiB")
    })
}

/// The size with the largest suffix that divides it.
#[must_use]
pub fn show(bytes: usize) -> String {
    let fits = |(_, scale): &&(&str, usize)| bytes > 0 && bytes.is_multiple_of(*scale);
    let (suffix, scale) = UNITS.iter().find(fits).unwrap_or(&UNITS[3]);
    format!("{} {suffix}", bytes / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        for (text, bytes, shown) in [
            ("1", 1, "1 B"),
            ("4KiB", 4096, "4 KiB"),
            ("4096B", 4096, "4 KiB"),
            ("3 MiB", 3 << 20, "3 MiB"),
            ("1536KiB", 1536 << 10, "1536 KiB"),
            ("2GiB", 2 << 30, "2 GiB"),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
            assert_eq!(show(bytes), shown);
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in
            ["", "B", "4KiBKiB", "0", "0KiB", "-1", "1.5MiB", "4kb", "4KB", "99999999999999GiB"]
        {
            assert!(parse(text).is_err_and(|problem| problem.contains(text)), "{text}");
        }
    }
}
