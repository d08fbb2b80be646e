//! The fuzz targets on their committed corpus, and on damaged copies of it.

#[path = "../../fuzz/src/lib.rs"]
#[allow(unreachable_pub, reason = "a library there, a module here")]
mod targets;

use std::fs;
use std::path::Path;

use pyroclast::checkpoint::Tensors;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Damaged copies of each file.
const COPIES: u64 = 300;

fn run(name: &str, target: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
    let mut files = 0;
    for entry in fs::read_dir(corpus).expect("a corpus") {
        let data = fs::read(entry.expect("an entry").path()).expect("a file");
        target(&data);
        for seed in 0..COPIES {
            target(&damaged(&data, seed));
        }
        files += 1;
    }
    assert!(files > 0, "the corpus of {name} is empty");
}

fn damaged(data: &[u8], seed: u64) -> Vec<u8> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut data = data.to_vec();
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(0..=data.len());
        match rng.random_range(0..4) {
            0 => data.truncate(at),
            1 => data.insert(at, rng.random()),
            2 => data.extend_from_within(at..),
            _ if at < data.len() => data[at] = rng.random(),
            _ => {}
        }
    }
    data
}

#[test]
fn frames() {
    run("frames", targets::frames);
}

#[test]
fn handshake() {
    run("handshake", targets::handshake);
}

/// Damaged files of `torch.save` and of safetensors are errors that name the file, or are read: never a panic.
#[test]
fn weights_from_elsewhere() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut refused = 0;
    for name in ["small.pt", "small.safetensors"] {
        let data = fs::read(pyroclast_tests::golden(name)).expect("a golden file");
        let path = folder.path().join(name);
        for seed in 0..COPIES {
            fs::write(&path, damaged(&data, seed)).expect("a file");
            let key = Some("state_dict").filter(|_| name == "small.pt");
            let read = Tensors::open(&path, key).and_then(|tensors| {
                tensors.names().into_iter().try_for_each(|name| tensors.read(name).map(drop))
            });
            if let Err(error) = read {
                assert!(error.to_string().contains(name), "{error}");
                refused += 1;
            }
        }
    }
    assert!(refused > COPIES / 2, "{refused}");
}
