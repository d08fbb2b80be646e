//! `pyroclast train` and `pyroclast bench` as several processes, each of them one rank.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Output};

mod ranks;

use ranks::{TINY, port, pyroclast, rows, text, train};
use serde_json::Value;

/// Starts a rank of a job whose rank 0 listens on `port`.
fn rank(folder: &Path, args: &[&str], port: &str, (rank, world): (usize, usize)) -> Child {
    pyroclast(folder, args)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world.to_string())
        .env("MASTER_PORT", port)
        // The binary's allocator then gives memory back as soon as it is freed.
        .env("MIMALLOC_PURGE_DELAY", "0")
        .spawn()
        .expect("the command should start")
}

/// Runs `world` ranks and returns how each ended.
fn ranks(folder: &Path, args: &[&str], world: usize) -> Vec<Output> {
    let port = port();
    let all: Vec<Child> = (0..world).map(|r| rank(folder, args, &port, (r, world))).collect();
    all.into_iter().map(|child| child.wait_with_output().expect("an end")).collect()
}

#[test]
fn processes_train_as_threads_do_and_continue_their_runs() {
    for world in [2, 3] {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        let devices = format!("--devices={world}");
        let threads = |args: &[&str]| {
            let args = [args, &[&*devices]].concat();
            let output = pyroclast(here, &train(&args)).output().expect("the command");
            assert!(output.status.success(), "{}", text(&output.stderr));
        };
        let processes = |args: &[&str]| {
            let outputs = ranks(here, &train(args), world);
            let said: Vec<String> = outputs.iter().map(|output| text(&output.stderr)).collect();
            for (rank, output) in outputs.iter().enumerate() {
                assert!(output.status.success(), "rank {rank}: {said:?}");
                assert_eq!(output.stdout.is_empty(), rank > 0, "only rank 0 speaks");
            }
        };
        threads(&["--out=threads"]);
        processes(&["--out=processes"]);
        assert_eq!(rows(&here.join("threads")), rows(&here.join("processes")), "{world} ranks");

        processes(&["--out=threads", "--resume=auto", "--max-steps=5"]);
        threads(&["--out=whole", "--max-steps=5"]);
        let train_rows = |run: &str| {
            let rows = rows(&here.join(run)).into_iter();
            rows.filter(|row| row[1] == "train").collect::<Vec<_>>()
        };
        assert_eq!(train_rows("threads"), train_rows("whole"), "{world} ranks");

        // Without a name rank 0 chooses one, and no other rank makes a folder of its own.
        processes(&[]);
        let runs: Vec<_> = fs::read_dir(here.join("runs")).expect("the runs").collect();
        assert_eq!(runs.len(), 1);
        assert_eq!(rows(&here.join("runs/gpt-nano-1")), rows(&here.join("processes")));
    }
}

#[test]
fn sharded_processes_compute_what_one_does_with_everything() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let run = |name: &str, args: &[&str], world| {
        let out = format!("--out={name}");
        let outputs = ranks(here, &train(&[args, &[&*out]].concat()), world);
        for output in &outputs {
            assert!(output.status.success(), "{}", text(&output.stderr));
        }
        rows(&here.join(name))
    };
    for world in [2, 3] {
        let ddp = run(&format!("ddp{world}"), &["--strategy=ddp"], world);
        for (name, args) in [
            ("zero2", &["--strategy=zero2"][..]),
            ("zero3", &["--strategy=deepspeed_stage_3"]),
            ("recomputed", &["--strategy=fsdp", "--activation-checkpointing=types=Block"]),
            ("kept", &[r#"--strategy={"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}"#]),
        ] {
            assert_eq!(run(&format!("{name}{world}"), args, world), ddp, "{name}, {world} ranks");
        }
    }
}

#[test]
fn the_memory_of_processes_follows_what_is_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    // Large enough to stand out: about 25 million parameters.
    let large = ["--layers=8", "--width=512", "--batch-size=1", "--val-check-interval=0"];
    let measured = |strategy: &str| -> (i64, i64) {
        let (strategy, out) = (format!("--strategy={strategy}"), format!("--out={strategy}"));
        let outputs = ranks(here, &train(&[&large[..], &[&*strategy, &*out]].concat()), 2);
        assert!(outputs.iter().all(|o| o.status.success()), "{}", text(&outputs[0].stderr));
        let run = out.strip_prefix("--out=").expect("a folder");
        let metrics = fs::read_to_string(here.join(run).join("metrics.jsonl")).expect("metrics");
        let last: Value =
            metrics.lines().last().and_then(|l| serde_json::from_str(l).ok()).expect("a row");
        let number = |value: &Value| value.as_i64().expect("bytes");
        // Before saving, which gathers the model.
        (number(&last["peak_rss_bytes"]), number(&last["memory"]["peak"]["total"][0]))
    };
    let (ddp, zero3) = (measured("ddp"), measured("zero3"));
    let (saved, counted) = (ddp.0 - zero3.0, ddp.1 - zero3.1);
    assert!(counted > 150 << 20, "sharding should save more than {counted} bytes");
    // Allocators keep some of what is freed, and both runs need some memory that nobody counts.
    assert!(
        saved * 10 > counted * 6,
        "{counted} bytes fewer are counted, but {saved} less is used"
    );
}

#[test]
fn a_job_of_one_process_is_a_run_of_one_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = ranks(folder.path(), &train(&["--out=run"]), 1).remove(0);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(rows(&folder.path().join("run")).len(), 4, "three steps and a validation");
}

#[test]
fn a_rank_that_cannot_read_its_input_ends_the_others_and_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let port = port();
    let all: Vec<Child> = (0..3)
        .map(|r| {
            let data: &[&str] = if r == 1 { &["--data=missing.txt"] } else { &[] };
            rank(folder.path(), &train(data), &port, (r, 3))
        })
        .collect();
    for (rank, child) in all.into_iter().enumerate() {
        let output = child.wait_with_output().expect("an end");
        let said = text(&output.stderr);
        let (code, expected) = match rank {
            1 => (2, "rank 1: error: data: missing.txt".to_owned()),
            _ => (1, format!("rank {rank}: error: rank 1 failed: data: missing.txt")),
        };
        assert_eq!(output.status.code(), Some(code), "rank {rank}: {said}");
        assert!(said.contains(&expected), "rank {rank}: {said}");
    }
}

#[test]
fn a_folder_that_is_taken_is_one_mistake_of_rank_0() {
    let folder = tempfile::tempdir().expect("a folder");
    let args = train(&["--out=run"]);
    assert!(ranks(folder.path(), &args, 2).iter().all(|output| output.status.success()));
    let again = ranks(folder.path(), &args, 2);
    let said: Vec<String> = again.iter().map(|output| text(&output.stderr)).collect();
    assert_eq!(again[0].status.code(), Some(2), "{said:?}");
    assert!(said[0].contains("out: run: holds a run already"), "{said:?}");
    assert_eq!(again[1].status.code(), Some(1), "{said:?}");
    assert!(said[1].contains("rank 0 failed: out: run"), "{said:?}");
}

#[test]
fn wrong_environments_are_one_line_and_exit_code_2() {
    let folder = tempfile::tempdir().expect("a folder");
    type Case = (&'static [(&'static str, &'static str)], &'static [&'static str], &'static str);
    const TWO: [(&str, &str); 2] = [("RANK", "0"), ("WORLD_SIZE", "2")];
    let table: &[Case] = &[
        (&[("RANK", "0")], &[], "rank 0: error: RANK: is set"),
        (&[("WORLD_SIZE", "2")], &[], "error: WORLD_SIZE: is set"),
        (&[("RANK", "2"), ("WORLD_SIZE", "2")], &[], "RANK: `2` is out of range"),
        (&TWO, &["--devices=3"], "WORLD_SIZE is 2"),
        (&TWO, &["--num-nodes=3"], "WORLD_SIZE is 2"),
        (&TWO, &["--node-rank=1"], "node_rank: 1, but RANK 0"),
        (&TWO, &["--strategy=single"], "`single` is for one rank, but there are 2"),
        (&TWO, &["--master-addr=10.0.0.1"], "PYROCLAST_JOB_SECRET: is not set"),
        (&[("PYROCLAST_TIMEOUT", "0")], &[], "PYROCLAST_TIMEOUT: `0`"),
        (&[], &["--master-port=1"], "start one process per rank, with RANK and WORLD_SIZE"),
        (&[], &["--node-rank=0"], "start one process per rank, with RANK and WORLD_SIZE"),
        (&[], &["--num-nodes=2"], "start one process per rank, with RANK and WORLD_SIZE"),
        (&[], &["--spawn=process"], "start one process per rank, with RANK and WORLD_SIZE"),
    ];
    for (variables, args, expected) in table {
        let mut command = pyroclast(folder.path(), &train(args));
        let output = command.envs(variables.iter().copied()).output().expect("the command");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{variables:?} {args:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{variables:?} {args:?}: {said}");
        assert!(said.contains(expected), "{variables:?} {args:?}: {said}");
    }
    assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);
}

#[test]
fn flags_win_over_the_environment() {
    let folder = tempfile::tempdir().expect("a folder");
    let args = train(&["--master-port=29999", "--print-config"]);
    let variables = [("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_PORT", "none")];
    let output = pyroclast(folder.path(), &args).envs(variables).output().expect("the command");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let config: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((config["world"].as_u64(), config["strategy"].as_str()), (Some(4), Some("ddp")));
    assert_eq!(config["spawn"].as_str(), Some("process"));
}

#[test]
fn bench_starts_its_ranks_itself_or_is_one_of_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let args = ["bench", "collectives", "--op=all_reduce", "--sizes=64KiB", "--iterations=3"];
    let json = |output: &Output| -> Value {
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("one line of JSON")
    };
    let tcp = ["--transport=tcp", "--sockets=2", "--format=json"];
    let command = [&args[..], &tcp, &["--world=3"]].concat();
    let started = json(&pyroclast(folder.path(), &command).output().expect("the command"));
    assert_eq!((started["world"].as_u64(), started["verified"].as_bool()), (Some(3), Some(true)));
    assert_eq!(started["transport"], "tcp");

    let by_hand = ranks(folder.path(), &[&args[..], &["--format=json"]].concat(), 2);
    assert_eq!(json(&by_hand[0])["world"].as_u64(), Some(2));
    assert!(by_hand[1].status.success() && by_hand[1].stdout.is_empty());
}

#[cfg(unix)]
mod killed {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    fn signal(pid: u32, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(pid).expect("a process id")), signal).expect("a process");
    }

    /// The lines that a process says from now on.
    fn lines(child: &mut Child) -> impl Iterator<Item = String> + use<> {
        let stdout = child.stdout.take().expect("its output");
        BufReader::new(stdout).lines().map_while(Result::ok)
    }

    #[test]
    fn a_killed_rank_ends_the_others_and_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let port = port();
        let endless = ["--max-steps=1000000", "--val-check-interval=0", "--out=run"];
        let args = [&TINY[..6], &endless].concat();
        let mut all: Vec<Child> =
            (0..3).map(|r| rank(folder.path(), &args, &port, (r, 3))).collect();
        let mut said = lines(&mut all[0]);
        assert!(said.any(|line| line.starts_with("step 10/")), "the run should come to step 10");
        signal(all[2].id(), Signal::SIGKILL);
        drop(said);
        for (rank, child) in all.into_iter().enumerate().take(2) {
            let output = child.wait_with_output().expect("an end");
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "rank {rank}: {said}");
            let expected = format!("rank {rank}: error: rank 2 failed: ");
            assert!(said.starts_with(&expected), "rank {rank}: {said}");
        }
    }

    #[test]
    fn an_interrupt_of_one_rank_ends_all_after_the_same_step() {
        let folder = tempfile::tempdir().expect("a folder");
        let port = port();
        let endless = ["--max-steps=1000000", "--val-check-interval=0", "--out=run"];
        let args = [&TINY[..6], &endless].concat();
        let mut all: Vec<Child> =
            (0..2).map(|r| rank(folder.path(), &args, &port, (r, 2))).collect();
        let mut said = lines(&mut all[0]);
        assert!(said.any(|line| line.starts_with("step 10/")), "the run should come to step 10");
        signal(all[1].id(), Signal::SIGINT);
        assert!(said.any(|line| line.starts_with("stopped after step")));
        for child in all {
            let output = child.wait_with_output().expect("an end");
            assert!(output.status.success(), "{}", text(&output.stderr));
        }
        let checkpoints = fs::read_dir(folder.path().join("run/checkpoints"));
        assert_eq!(checkpoints.expect("checkpoints").count(), 1);
    }

    /// A benchmark that takes minutes after its first line, which is here when this returns.
    #[cfg(target_os = "linux")]
    fn long_bench(folder: &Path) -> (Child, impl Iterator<Item = String> + use<>) {
        let args = ["bench", "collectives", "--transport=tcp", "--op=all_reduce"];
        let long = ["--sizes=4KiB,64MiB", "--iterations=1000", "--format=json"];
        let mut bench =
            pyroclast(folder, &[&args[..], &long].concat()).spawn().expect("the command");
        let mut said = lines(&mut bench);
        assert!(said.next().is_some_and(|line| line.contains("4096")));
        (bench, said)
    }

    /// The process that a bench started as `rank`.
    #[cfg(target_os = "linux")]
    fn child_of(bench: &Child, rank: usize) -> u32 {
        let pid = bench.id();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = fs::read_to_string(children).expect("its children");
        let variable = format!("RANK={rank}");
        let is_rank = |child: &&str| {
            let environment = fs::read(format!("/proc/{child}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|pair| pair == variable.as_bytes())
        };
        let child = children.split_whitespace().find(is_rank).expect("the rank");
        child.parse().expect("a process id")
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_killed_rank_of_a_bench_ends_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let (bench, said) = long_bench(folder.path());
        signal(child_of(&bench, 1), Signal::SIGKILL);
        assert_eq!(said.count(), 0, "no other line is measured");
        let output = bench.wait_with_output().expect("an end");
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(said.contains("error: the process of rank "), "{said}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_ranks_of_a_killed_bench_do_not_outlive_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut bench, said) = long_bench(folder.path());
        signal(bench.id(), Signal::SIGKILL);
        bench.wait().expect("an end");
        // Rank 0 holds the other end of this pipe.
        assert_eq!(said.count(), 0, "no other line is measured");
    }
}

#[test]
fn ranks_with_different_settings_or_data_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("other.txt"), vec![b'x'; 4096]).expect("a text");
    let data = "--data=other.txt";
    for (flag, setting) in
        [("--lr=0.5", "lr"), ("--accumulate-grad-batches=2", "accum"), (data, "data_sha256")]
    {
        let port = port();
        let all: Vec<Child> = (0..2)
            .map(|r| {
                let flags: &[&str] = if r == 1 { &[flag] } else { &[] };
                rank(folder.path(), &train(flags), &port, (r, 2))
            })
            .collect();
        let ends: Vec<Output> =
            all.into_iter().map(|child| child.wait_with_output().expect("an end")).collect();
        let said = text(&ends[1].stderr);
        assert_eq!(ends[1].status.code(), Some(2), "{said}");
        assert!(said.contains(setting) && said.contains("on rank 0"), "{said}");
        let told = text(&ends[0].stderr);
        assert_eq!(ends[0].status.code(), Some(1), "{told}");
        assert!(told.contains("rank 1 failed") && told.contains(setting), "{told}");
    }
}
