//! The `pyroclast` command as a user types it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const TINY: [&str; 8] = [
    "--layers=1",
    "--heads=2",
    "--width=16",
    "--context=8",
    "--batch-size=2",
    "--max-steps=3",
    "--limit-val-batches=1",
    "--seed=1",
];

fn pyroclast(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pyroclast"))
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .expect("the command should start")
}

fn train(folder: &Path, args: &[&str]) -> Output {
    pyroclast(folder, &[&["train"], &TINY[..], args].concat())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn wrong_input_is_one_line_and_exit_code_2() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    fs::write(here.join("short.txt"), "abc").expect("a text");
    fs::write(here.join("empty.txt"), "").expect("a text");
    fs::write(here.join("file"), "not a folder").expect("a file");
    fs::write(here.join("wrong.toml"), "modle = \"gpt2\"").expect("a file");
    fs::write(here.join("nan.toml"), "lr = nan").expect("a file");
    fs::create_dir(here.join("nothing")).expect("a folder");
    let table: &[(&[&str], &str)] = &[
        (&["--data", "missing.txt"], "missing.txt"),
        (&["--data", "short.txt", "--val-split=0"], "at least 9"),
        (&["--data", "empty.txt"], "holds no text"),
        (&["--data", "nothing"], "holds no text"),
        (&["--devices=0"], "devices: 0 ranks"),
        (&["--devices=-1"], "--devices"),
        (&["--model=gpt-nan"], "there are gpt-nano"),
        (&["--heads=3"], "3 heads do not divide"),
        (&["--batch-size=0"], "batch_size"),
        (&["--accelerator=tpu"], "unknown accelerator `tpu`"),
        (&["--accelerator=cuda"], "cuda"),
        (&["--out=file/run"], "out: file/run"),
        (&["--config=wrong.toml"], "did you mean `model`?"),
        (&["--config=missing.toml"], "missing.toml"),
        (&["--stratgy=ddp"], "--strategy"),
        (&["--strategy=fsdp_cpu_offload"], "not in this version"),
        (&["--precision=transformer-engine"], "not in this version"),
        (&["--precision=f16"], "there are 32-true, 64-true, 16-mixed"),
        (&["--loss-scale=128"], "is for f16"),
        (&["--precision=16-mixed", "--loss-scale=0"], "0 is out of range"),
        (&["--checkpoint={\"save_top_k\": 2}"], "need a `monitor`"),
        (&["--checkpoint={\"every\": 2}"], "unknown field `every`"),
        (&["--reduce-dtype=f12"], "there are f64, f32, f16, bf16"),
        (&["--precision-overrides={\"types=Norm\": \"32-true\"}"], "there are Block, Embedding"),
        (&["--deepspeed=ds.json"], "ds.json: No such file"),
        (&["--spawn=process"], "not in this version"),
        (&["--num-nodes=2"], "RANK and WORLD_SIZE"),
        (&["--master-port=1"], "RANK and WORLD_SIZE"),
        (&["--val-split=1.5"], "val_split"),
        (&["--sampling=odd"], "there are random, sequential"),
        (&["--init-from=missing.safetensors"], "missing.safetensors"),
        (&["--init-from=short.txt"], "short.txt"),
        (&["--save-weights=missing/w.safetensors"], "its folder does not exist"),
        (&["--resume=missing"], "no such folder"),
        (&["--resume=auto"], "`out`, which is not set"),
        (&["--resume=nothing"], "checkpoint.json"),
        (&["--out="], "out"),
        (&["--config=nan.toml"], "lr: \"NaN\" in nan.toml"),
        (&["--batch-size=18446744073709551615"], "batch_size: 18446744073709551615"),
        (&["--devices=3000"], "the limit is 256"),
        (&["--width=1000000000"], "width: 1000000000"),
        (&["--layers=0"], "layers: 0"),
        (&["--context=18446744073709551615"], "context"),
        (&["--accumulate-grad-batches=99999999999"], "accumulate_grad_batches"),
        (&["--lr", "-1"], "lr: -1 is out of range"),
        (&["--limit-val-batches=0"], "limit_val_batches"),
        (&["--fast-dev-run", "--save-weights=w"], "fast_dev_run writes nothing"),
        (&["--save-weights=nothing"], "is a folder"),
    ];
    for (args, expected) in table {
        let output = train(here, args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        // Mesa's drivers write a line of their own where there is no desktop.
        let lines: Vec<&str> =
            said.lines().filter(|line| !line.contains("XDG_RUNTIME_DIR")).collect();
        assert_eq!(lines.len(), 1, "{args:?}: {said}");
        assert!(lines[0].starts_with("error: ") && said.contains(expected), "{args:?}: {said}");
        assert!(!here.join("runs").exists(), "{args:?} left something behind");
    }
}

#[test]
fn all_mistakes_are_reported_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = train(folder.path(), &["--lr=-1", "--devices=0", "--heads=3", "--spawn=process"]);
    let said = text(&output.stderr);
    for setting in ["lr:", "devices:", "heads:", "spawn:"] {
        assert!(said.contains(setting), "{setting} {said}");
    }
}

#[test]
fn a_run_leaves_what_the_contract_names_and_can_be_continued() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let output = train(here, &["--out=run", "--devices=2", "--save-weights=weights.safetensors"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    for expected in
        ["before training", "after training", "step 3/3", "validation loss", "run/report.html"]
    {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let metrics = fs::read_to_string(here.join("run/metrics.jsonl")).expect("metrics");
    assert_eq!(metrics.lines().count(), 4, "three steps and a validation");
    let row: serde_json::Value =
        serde_json::from_str(metrics.lines().next().unwrap_or_default()).expect("a row");
    let keys = "step epoch split loss grad_norm lr loss_scale skipped tokens tokens_per_s step_ms peak_rss_bytes peak_device_bytes memory";
    for key in keys.split(' ') {
        assert!(row.get(key).is_some(), "{key} is missing in {row}");
    }
    assert_eq!((row["step"].as_u64(), row["split"].as_str()), (Some(1), Some("train")));
    let config =
        fs::read_to_string(here.join("run/config.resolved.json")).expect("a configuration");
    let config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    assert_eq!((config["strategy"].as_str(), config["width"].as_u64()), (Some("ddp"), Some(16)));
    let report = fs::read_to_string(here.join("run/report.html")).expect("a report");
    assert!(report.contains("<svg") && report.contains("after training"));
    assert!(
        !report.contains("<script") && !report.contains("http"),
        "the report is self-contained"
    );

    let taken = train(here, &["--out=run"]);
    assert_eq!(taken.status.code(), Some(2), "the folder holds a run");
    let resumed = train(here, &["--out=run", "--resume=auto", "--max-steps=5"]);
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    let metrics = fs::read_to_string(here.join("run/metrics.jsonl")).expect("metrics");
    let steps: Vec<_> = metrics.lines().filter(|line| line.contains("\"train\"")).collect();
    assert_eq!(steps.len(), 5);

    let from_weights = train(here, &["--out=again", "--init-from=weights.safetensors"]);
    assert!(from_weights.status.success(), "{}", text(&from_weights.stderr));
}

#[test]
fn generate_continues_a_text_and_repeats_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    assert!(train(here, &["--out=run"]).status.success());
    let generate = |args: &[&str]| {
        let args = [&["generate", "--from=run", "--prompt=Once", "--length=30"], args].concat();
        let output = pyroclast(here, &args);
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, first, said) = generate(&["--seed=3", "--top-k=20", "--top-p=0.9"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(first.starts_with("Once") && first.len() >= 30, "{first}");
    assert_eq!(first, generate(&["--seed=3", "--top-k=20", "--top-p=0.9"]).1);
    assert_ne!(first, generate(&["--seed=4", "--top-k=20", "--top-p=0.9"]).1);
    let checkpoint = generate(&["--from=run/checkpoints/step-00000003"]);
    assert_eq!(checkpoint.0, Some(0), "a checkpoint's own folder: {}", checkpoint.2);
    for wrong in ["--top-k=0", "--top-p=2", "--temperature=-1"] {
        assert_eq!(generate(&[wrong]).0, Some(2), "{wrong}");
    }
    let nowhere = pyroclast(here, &["generate", "--from=nowhere"]);
    assert_eq!(nowhere.status.code(), Some(2));
}

#[test]
fn print_config_shows_what_would_run_and_writes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("run.toml"), "lr = 0.5\nmodel = \"gpt-mini\"\n").expect("a file");
    let args = ["train", "--config=run.toml", "--print_config", "--max_steps=7", "--lr=0.25"];
    let output = pyroclast(folder.path(), &args);
    let config: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((config["lr"].as_f64(), config["layers"].as_u64()), (Some(0.25), Some(6)));
    assert_eq!(config["max_steps"].as_u64(), Some(7));
    let sources =
        serde_json::json!({ "lr": "--lr", "max_steps": "--max-steps", "model": "run.toml" });
    assert_eq!(config["sources"], sources);
    assert!(!folder.path().join("runs").exists());
}

#[test]
fn what_print_config_shows_can_be_read_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let shown = |args: &[&str]| -> serde_json::Value {
        let output = pyroclast(folder.path(), &[&["train", "--print-config"], args].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let mut shown: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        // Where a value came from is another file now, and what was noted has been done.
        let settings = shown.as_object_mut().expect("settings");
        settings.remove("sources");
        settings.remove("notes");
        shown
    };
    let first = shown(&[
        "--devices=2",
        "--lr-scaling=sqrt",
        "--accumulate-grad-batches=3",
        "--activation-checkpointing=types=Block",
        r#"--strategy={"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}"#,
        "--out=run",
    ]);
    let deepspeed = r#"{
        "train_batch_size": 12, "gradient_accumulation_steps": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1000}
    }"#;
    fs::write(folder.path().join("ds.json"), deepspeed).expect("a file");
    for given in [first, shown(&["--deepspeed=ds.json", "--devices=2"])] {
        fs::write(folder.path().join("again.json"), given.to_string()).expect("a file");
        assert_eq!(shown(&["--config=again.json"]), given);
    }
}

#[test]
fn fast_dev_run_writes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = train(folder.path(), &["--fast-dev-run"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);
}

#[test]
fn doctor_speaks_to_people_and_machines() {
    let folder = tempfile::tempdir().expect("a folder");
    let people = pyroclast(folder.path(), &["doctor"]);
    assert!(people.status.success() && text(&people.stdout).contains("Devices"));
    let machines = pyroclast(folder.path(), &["doctor", "--format=json"]);
    let doctor: serde_json::Value = serde_json::from_slice(&machines.stdout).expect("JSON");
    assert_eq!(doctor["devices"][0]["accelerator"], "cpu");
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_run_after_a_checkpoint() {
    use std::io::{BufRead, BufReader};
    let folder = tempfile::tempdir().expect("a folder");
    let mut run = Command::new(env!("CARGO_BIN_EXE_pyroclast"))
        .args(
            [
                &["train"],
                &TINY[..5],
                &["--max-steps=1000000", "--val-check-interval=0", "--out=run"],
            ]
            .concat(),
        )
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the command should start");
    let lines = BufReader::new(run.stdout.take().expect("its output")).lines();
    let mut rest = lines.map_while(Result::ok).skip_while(|line| !line.starts_with("step 10/"));
    assert!(rest.next().is_some(), "the run should come to step 10");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(run.id()).expect("a process id"));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("a signal");
    assert!(rest.any(|line| line.starts_with("stopped after step")));
    assert!(run.wait().expect("an end").success());
    let checkpoints = fs::read_dir(folder.path().join("run/checkpoints")).expect("checkpoints");
    assert_eq!(checkpoints.count(), 1);
}

#[cfg(unix)]
#[test]
fn names_that_are_not_text_are_refused_and_drop_no_other_flag() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().expect("a folder");
    for flag in [&b"--out=n\xff"[..], b"--data=n\xff", b"--save-weights=n\xff"] {
        let output = Command::new(env!("CARGO_BIN_EXE_pyroclast"))
            .arg("train")
            .args(TINY)
            .arg(OsStr::from_bytes(flag))
            .current_dir(folder.path())
            .output()
            .expect("the command should start");
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    }
}
