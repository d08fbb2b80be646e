use std::collections::BTreeMap;

use pyroclast_kernels::numbers::Numbers;
use pyroclast_strategies::{ParamInfo, PieceOf};

use super::disk::faults::{self, Fault};
use super::manifest::file_of;
use super::*;

/// Elements of the one parameter, which two ranks share.
const LEN: usize = 10;

fn info() -> ParamInfo {
    ParamInfo { path: "block.weight".to_owned(), shape: vec![2, 5] }
}

fn manifest(step: u64) -> Manifest {
    Manifest {
        format: FORMAT,
        step,
        skipped: 0,
        scaler: None,
        samples: 7,
        tokens: 70,
        dataset_len: 40,
        callbacks: BTreeMap::new(),
        kept: vec![],
        replaced: vec![],
        node_local: false,
        world: 2,
        config: serde_json::json!({"lr": 0.1}),
        tensors: BTreeMap::new(),
        files: BTreeMap::new(),
    }
}

/// The numbers of a step, of a type that is the step's as well.
fn numbers(step: u64, of: PieceOf) -> Numbers {
    let first = if of == PieceOf::Weights { 0.5 } else { 100.0 };
    let all = (0..LEN).map(|at| first + step as f32 * 10.0 + at as f32).collect();
    Numbers::F32(all).into_float(Float::ALL[step as usize % 4])
}

/// Writes a checkpoint as two ranks do, up to the first failure.
fn save(folder: &Path, step: u64) -> Result<PathBuf, Error> {
    let draft = Draft::new(&folder.join(format!("step-{step:08}")));
    let outcome = write_all(&draft, step);
    if outcome.is_err() {
        draft.discard();
    }
    outcome.map(|()| draft.path().to_owned())
}

fn write_all(draft: &Draft, step: u64) -> Result<(), Error> {
    draft.create()?;
    let mut written = vec![];
    let of = [PieceOf::Weights, PieceOf::State("exp_avg")];
    for (rank, range) in [0..4, 4..LEN].into_iter().enumerate() {
        let mut shard = draft.shard(rank);
        for of in of {
            shard.announce(of.name(), &info(), range.start, numbers(step, of).part(range.clone()));
            shard.alias("block.weight", &["head.weight".to_owned()]);
        }
        let mut file = shard.begin()?;
        for of in of {
            file.piece(of.name(), &info(), range.start, numbers(step, of).part(range.clone()))?;
        }
        written.push(file.finish()?);
    }
    draft.finish(&manifest(step).with_files(written))
}

fn check(path: &Path, step: u64) {
    let read = Checkpoint::open(path).expect("a whole checkpoint");
    read.verify().expect("it is as it was written");
    assert_eq!(read.manifest.step, step);
    for of in [PieceOf::Weights, PieceOf::State("exp_avg")] {
        let expected = numbers(step, of);
        for range in [0..LEN, 3..5, 0..4, 4..LEN, 9..10, 4..4] {
            let got = read.read(of.name(), "block.weight", range.clone()).expect("numbers");
            assert_eq!(got, Some(expected.part(range).to_numbers()));
        }
    }
    assert_eq!(read.read("exp_avg_sq", "block.weight", 0..1).expect("nothing"), None);
    assert_eq!(read.read("weights", "other", 0..1).expect("nothing"), None);
    let error = read.read("weights", "block.weight", 5..LEN + 1).expect_err("too many");
    assert!(error.to_string().contains("has 10 elements, not 11"), "{error}");
}

#[test]
fn a_checkpoint_of_every_type_survives_the_round_trip() {
    let folder = tempfile::tempdir().expect("a folder");
    for step in 1..=4 {
        check(&save(folder.path(), step).expect("saving"), step);
    }
    let newest = newest(folder.path()).expect("a folder").expect("a checkpoint");
    assert!(newest.ends_with("step-00000004"));
}

/// Whatever the file system does at whichever call.
fn with_faults(fault: Fault, after: impl Fn(&Path, Result<PathBuf, Error>)) {
    faults::set(None);
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), 1).expect("saving");
    let calls = faults::set(None);
    assert!(calls >= 12, "{calls}");
    for call in 0..calls + 3 {
        let folder = tempfile::tempdir().expect("a folder");
        save(folder.path(), 1).expect("the first checkpoint");
        faults::set(Some((call, fault)));
        let outcome = save(folder.path(), 2);
        faults::set(None);
        assert_eq!(outcome.is_ok(), call >= calls, "{call} of {calls}");
        after(folder.path(), outcome);
        // The run goes on, and whatever was left does not matter.
        check(&save(folder.path(), 3).expect("the third checkpoint"), 3);
        let found = newest(folder.path()).expect("a folder").expect("a checkpoint");
        check(&found, 3);
    }
}

#[test]
fn a_crash_at_any_call_leaves_a_whole_checkpoint() {
    with_faults(Fault::Death, |folder, outcome| {
        let found = newest(folder).expect("a folder").expect("a checkpoint");
        // After the renaming the new one is there, though nobody has heard of it.
        let step = if found.ends_with("step-00000002") { 2 } else { 1 };
        assert!(outcome.is_err() || step == 2);
        check(&found, step);
    });
}

#[test]
fn a_call_that_fails_leaves_the_checkpoint_before_and_nothing_else() {
    with_faults(Fault::Once, |folder, outcome| {
        let found = newest(folder).expect("a folder").expect("a checkpoint");
        let step = if found.ends_with("step-00000002") { 2 } else { 1 };
        check(&found, step);
        if let Err(error) = outcome {
            assert!(matches!(error, Error::Io { .. }), "{error}");
        }
        let hidden = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with('.');
        let left = fs::read_dir(folder).expect("the folder").filter_map(Result::ok);
        assert_eq!(left.filter(hidden).count(), 0, "temporary files are removed");
    });
}

#[test]
fn a_parameter_that_stands_at_two_paths_is_exported_under_both() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = Checkpoint::open(&save(folder.path(), 1).expect("saving")).expect("reading");
    let path = folder.path().join("all.safetensors");
    let transposed = |info: &ParamInfo| Stored { name: info.path.clone(), transposed: true };
    export(&checkpoint, &path, Some(Float::F64), transposed).expect("exporting");
    let file = TensorFile::open(&path).expect("a file");
    assert_eq!(file.names().collect::<Vec<_>>(), ["block.weight", "head.weight"]);
    let expected = transpose(&numbers(1, PieceOf::Weights).into_float(Float::F64), 2, 5);
    for name in ["block.weight", "head.weight"] {
        assert_eq!(file.shape(name), Some(&[5, 2][..]));
        assert_eq!(file.read(name).expect("numbers"), expected);
    }
    let to = folder.path().join("resharded");
    reshard(&checkpoint, &to, 4).expect("resharding");
    check(&to, 1);
    let again = Checkpoint::open(&to).expect("reading").manifest;
    assert_eq!((again.world, &again.tensors), (4, &checkpoint.manifest.tensors));
}

/// Reads everything that can be read.
fn read_all(path: &Path) -> Result<(), Error> {
    let read = Checkpoint::open(path)?;
    for (path, tensor) in &read.manifest.tensors {
        read.read_all("weights", path)?;
        for state in tensor.states.keys() {
            read.read_all(state, path)?;
        }
    }
    read.verify()
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(folder.path(), 1).expect("saving");
    for rank in 0..2 {
        let file = path.join(file_of(rank));
        let bytes = fs::read(&file).expect("the file");
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(&file, &damaged).expect("damage");
            let error = read_all(&path).expect_err("a flipped bit").to_string();
            assert!(error.contains(&file_of(rank)) && error.contains("damaged"), "{at}: {error}");
            fs::write(&file, &bytes[..at]).expect("damage");
            let error = read_all(&path).expect_err("a cut").to_string();
            assert!(error.contains(&format!("has {at} bytes")), "{error}");
        }
        fs::remove_file(&file).expect("damage");
        assert!(matches!(read_all(&path), Err(Error::BadFile { .. })), "a file is missing");
        fs::write(&file, &bytes).expect("mended");
    }
    read_all(&path).expect("as it was");
}

#[test]
fn files_of_another_checkpoint_are_noticed() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = save(folder.path(), 1).expect("saving");
    let second = save(folder.path(), 5).expect("saving");
    fs::copy(first.join(file_of(1)), second.join(file_of(1))).expect("a mixture");
    let error = read_all(&second).expect_err("a mixture").to_string();
    assert!(error.contains("damaged"), "{error}");
}

#[test]
fn manifests_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(folder.path(), 1).expect("saving");
    let file = path.join(manifest::NAME);
    let good: serde_json::Value =
        serde_json::from_slice(&fs::read(&file).expect("the manifest")).expect("JSON");
    type Change = fn(&mut serde_json::Value);
    let table: [(Change, &str); 14] = [
        (|m| m["format"] = 1.into(), "format 1; this version reads format 4"),
        (|m| m["world"] = 3.into(), "3 ranks wrote the files"),
        (|m| m["world"] = u64::MAX.into(), "ranks wrote the files"),
        (|m| m["skipped"] = 9.into(), "9 of 1 steps were skipped"),
        (|m| m["extra"] = 9.into(), "unknown field `extra`"),
        (|m| m["replaced"] = serde_json::json!(["../a"]), "no checkpoint's name"),
        (|m| m["replaced"] = serde_json::json!([".."]), "no checkpoint's name"),
        (|m| m["tensors"]["block.weight"]["shape"] = serde_json::json!([2, 6]), "gaps or overlap"),
        (
            |m| m["tensors"]["block.weight"]["shape"] = serde_json::json!([u64::MAX, 4]),
            "has the shape",
        ),
        (|m| m["tensors"]["block.weight"]["dtype"] = "f64".into(), "but f64 in the manifest"),
        (|m| m["tensors"]["block.weight"]["states"] = serde_json::json!({}), "not in the manifest"),
        (
            |m| {
                let entry = m["tensors"]["block.weight"].clone();
                m["tensors"]["other"] = entry;
            },
            "weights of `other` should have 10 elements",
        ),
        (
            |m| {
                let files = m["files"].as_object_mut().expect("files");
                let entry = files.remove("rank-00001.safetensors").expect("an entry");
                files.insert("../../etc/passwd".to_owned(), entry);
            },
            "ranks wrote the files ../../etc/passwd",
        ),
        (|m| m["files"]["rank-00000.safetensors"]["bytes"] = (1u64 << 60).into(), "blocks"),
    ];
    for (change, expected) in table {
        let mut changed = good.clone();
        change(&mut changed);
        fs::write(&file, changed.to_string()).expect("a manifest");
        let error = read_all(&path).expect_err(expected).to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn no_manifest_makes_it_panic() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(folder.path(), 1).expect("saving");
    let file = path.join(manifest::NAME);
    let good = fs::read(&file).expect("the manifest");
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as usize % below
    };
    for _ in 0..400 {
        let mut text = good.clone();
        for _ in 0..1 + next(4) {
            match next(3) {
                0 => {
                    let at = next(text.len());
                    text[at] = next(256) as u8;
                }
                1 => drop(text.remove(next(text.len()))),
                _ => text.insert(next(text.len()), b"0123456789\"{}[],:-e"[next(19)]),
            }
        }
        fs::write(&file, &text).expect("a manifest");
        // A changed number of samples, say, is as good as another.
        let _ = read_all(&path);
    }
}
