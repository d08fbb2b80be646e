//! Jobs of machines that share no folder: each keeps its ranks' part of every checkpoint.

mod ranks;

use std::fs;
use std::path::Path;
use std::process::{Child, Output};

use ranks::{port, pyroclast, rows, text, train};
use serde_json::json;

/// Runs a job of two machines of two ranks, each with a folder of its own.
fn machines(folder: &Path, args: &[&str]) -> Vec<Output> {
    let port = port();
    let all: Vec<Child> = (0..4)
        .map(|rank| {
            let machine = folder.join(format!("machine{}", rank / 2));
            fs::create_dir_all(&machine).expect("a machine's disk");
            pyroclast(&machine, &train(args))
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", "4")
                .env("LOCAL_RANK", (rank % 2).to_string())
                .env("LOCAL_WORLD_SIZE", "2")
                .env("MASTER_PORT", &port)
                .spawn()
                .expect("the command should start")
        })
        .collect();
    all.into_iter().map(|child| child.wait_with_output().expect("an end")).collect()
}

fn succeed(outputs: Vec<Output>) {
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", text(&output.stderr));
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn machines_keep_their_own_parts_of_a_run() {
    for (strategy, is_async) in [("ddp", false), ("zero1", true), ("zero3", false)] {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        let strategy = format!("--strategy={strategy}");
        let checkpoint = json!({
            "every_n_train_steps": 1, "save_top_k": -1, "async_save": is_async
        });
        let checkpoint = format!("--checkpoint={checkpoint}");
        let kept = [&*checkpoint, &strategy];
        let job = |args: &[&str]| {
            machines(here, &[&kept[..], &["--node-local", "--out=run"], args].concat())
        };
        succeed(job(&[]));
        let whole = train(&["--out=whole", "--devices=4", "--max-steps=5", &strategy]);
        let output = pyroclast(here, &whole).output().expect("the command");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let checkpoints = |machine: usize| here.join(format!("machine{machine}/run/checkpoints"));
        for (machine, ranks) in [[0, 1], [2, 3]].iter().enumerate() {
            let expected = [1, 2, 3].map(|step| format!("step-0000000{step}"));
            assert_eq!(names(&checkpoints(machine)), expected);
            let files = ranks.map(|rank| format!("rank-0000{rank}.safetensors"));
            let expected = ["checkpoint.json", &files[0], &files[1]];
            assert_eq!(names(&checkpoints(machine).join("step-00000003")), expected);
        }
        assert!(!here.join("machine1/run/metrics.jsonl").exists(), "rank 0 alone writes them");

        // A crash came when only the second machine had made the third.
        fs::remove_dir_all(checkpoints(0).join("step-00000003")).expect("a checkpoint");
        succeed(job(&["--resume=auto", "--max-steps=5"]));
        let of_training =
            |run: &Path| rows(run).into_iter().filter(|row| row[1] == "train").collect::<Vec<_>>();
        let expected = of_training(&here.join("whole"));
        assert_eq!(of_training(&here.join("machine0/run")), expected, "{strategy}");

        // One machine's part can be looked at and verified, but its weights are not all there.
        let first = checkpoints(0).join("step-00000005");
        let command = |args: &[&str]| {
            pyroclast(here, &[&["checkpoint"], args].concat()).output().expect("the command")
        };
        let from = format!("--from={}", first.display());
        let verified = command(&["verify", &from]);
        assert!(text(&verified.stdout).contains("2 of 4 files are here"), "{verified:?}");
        let exported = command(&["export", &from, "--to=w.safetensors"]);
        assert_eq!(exported.status.code(), Some(2), "{exported:?}");
        let said = text(&exported.stderr);
        assert!(said.contains("rank-00002.safetensors, rank-00003.safetensors"), "{said}");

        // All files in one folder are a checkpoint for anyone.
        for rank in [2, 3] {
            let file = format!("rank-0000{rank}.safetensors");
            fs::copy(checkpoints(1).join("step-00000005").join(&file), first.join(&file))
                .expect("a file");
        }
        let gathered = train(&["--out=alone", "--max-steps=6", "--batch-size=8"]);
        let resume = format!("--resume={}", first.display());
        let output = pyroclast(here, &[&gathered[..], &[&resume]].concat()).output();
        let output = output.expect("the command");
        assert!(output.status.success(), "{}", text(&output.stderr));

        // A machine that has lost its part is named.
        fs::remove_dir_all(here.join("machine1/run")).expect("the run");
        let outputs = job(&["--resume=auto", "--max-steps=7"]);
        for output in &outputs {
            let said = text(&output.stderr);
            assert!(said.contains("rank 2 finds no checkpoint in its folder"), "{said}");
            assert!(!output.status.success(), "{said}");
        }
        let shared = machines(here, &["--out=run", "--resume=auto", "--max-steps=7", &strategy]);
        for output in &shared {
            let said = text(&output.stderr);
            assert!(said.contains("let each keep its own with node_local"), "{said}");
            assert!(!output.status.success(), "{said}");
        }
    }
}
