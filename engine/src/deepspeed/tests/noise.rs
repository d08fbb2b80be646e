//! No text makes the translation panic.

use super::super::{Context, translate};

const CASES: usize = 20_000;
const VALID: &str = include_str!("../../../tests/deepspeed/everything.json");

/// The generator of Marsaglia: small, and the same on every machine.
struct Xorshift(u64);

impl Xorshift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

fn survive(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let context = Context { world: bytes.len() % 5, hidden_size: Some(usize::MAX) };
    let _ = translate(&text, &context);
}

#[test]
fn random_bytes_are_survived() {
    let mut random = Xorshift(0x9E37_79B9_7F4A_7C15);
    let alphabet = br#"{}[]":,/*#\ntrue0123456789.e-+ autfp16zero_optimizationstage"#;
    for case in 0..CASES {
        let length = random.below(120);
        let mut bytes = Vec::with_capacity(length + 1);
        bytes.push(b'{');
        bytes.extend((0..length).map(|_| match case % 2 {
            0 => random.next() as u8,
            _ => alphabet[random.below(alphabet.len())],
        }));
        survive(&bytes);
    }
}

#[test]
fn random_changes_to_a_valid_file_are_survived() {
    let mut random = Xorshift(0xD1B5_4A32_D192_ED03);
    let pieces: [&[u8]; 14] = [
        b"null",
        b"\"auto\"",
        b"{}",
        b"[]",
        b"-1",
        b"1e308",
        b"18446744073709551615",
        b"true",
        b"\"",
        b",",
        b"}",
        b"/*",
        b"0",
        b"-9223372036854775808",
    ];
    for _ in 0..CASES {
        let mut bytes = VALID.as_bytes().to_vec();
        for _ in 0..=random.below(4) {
            let at = random.below(bytes.len());
            let end = (at + random.below(12)).min(bytes.len());
            match random.below(3) {
                0 => drop(bytes.drain(at..end)),
                1 => bytes[at] = random.next() as u8,
                _ => drop(bytes.splice(at..end, pieces[random.below(pieces.len())].to_vec())),
            }
        }
        survive(&bytes);
    }
}

/// Every value of the file in turn becomes one of another kind.
#[test]
fn every_value_may_be_of_any_kind() {
    let odd = ["null", "true", "-1", "0.5", "1e30", "\"x\"", "\"auto\"", "[]", "[1, 2, 3]", "{}"];
    let lines: Vec<&str> = VALID.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let Some((key, value)) = line.split_once("\": ") else {
            continue;
        };
        if value.ends_with('{') {
            continue;
        }
        for odd in odd {
            let changed = format!("{key}\": {odd},");
            let mut lines = lines.clone();
            lines[at] = &changed;
            survive(lines.join("\n").as_bytes());
        }
    }
}
