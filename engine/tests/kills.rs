//! A run that is killed again and again loses nothing that was saved, and ends where it would have ended.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

fn start(folder: &Path, out: &str, steps: u64) -> Child {
    Command::new(env!("CARGO_BIN_EXE_pyroclast"))
        .args(["train", "--layers=1", "--heads=2", "--width=16", "--context=8", "--batch-size=2"])
        .args(["--devices=2", "--strategy=zero2", "--val-check-interval=0", "--resume=auto"])
        .args(["--limit-val-batches=1", r#"--checkpoint={"every_n_train_steps": 1}"#])
        .args([format!("--max-steps={steps}"), format!("--out={out}")])
        .arg(format!("--save-weights={out}.safetensors"))
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command should start")
}

/// Waits for the end of a run that is left alone.
fn finish(child: Child) {
    let output = child.wait_with_output().expect("an end");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Whether there is a checkpoint; if there is, every byte of the newest is as it was written.
fn verify(folder: &Path, out: &str) -> bool {
    let output = Command::new(env!("CARGO_BIN_EXE_pyroclast"))
        .args(["checkpoint", "verify", &format!("--from={out}")])
        .current_dir(folder)
        .output()
        .expect("the command should start");
    let said = String::from_utf8_lossy(&output.stderr);
    let is_there = output.status.success();
    assert!(is_there || said.contains(&format!("{out}/checkpoint.json")), "{said}");
    is_there
}

/// Lets a run do whatever it does.
#[expect(
    clippy::disallowed_methods,
    reason = "any moment is as good as another: nothing is awaited"
)]
fn let_run(time: Duration) {
    thread::sleep(time);
}

#[test]
fn a_run_that_is_killed_at_any_moment_continues_as_if_it_had_not_been() {
    let kills = if std::env::var_os("PYROCLAST_FULL").is_some() { 200 } else { 8 };
    let steps = 10 * kills;
    let folder = tempfile::tempdir().expect("a folder");
    finish(start(folder.path(), "whole", steps));
    let mut moment = 0x2545_f491_4f6c_dd1d_u64;
    let mut was_there = false;
    for _ in 0..kills {
        let mut child = start(folder.path(), "killed", steps);
        moment ^= moment << 13;
        moment ^= moment >> 7;
        moment ^= moment << 17;
        let_run(Duration::from_millis(moment % 300));
        child.kill().expect("a kill");
        child.wait().expect("an end");
        let is_there = verify(folder.path(), "killed");
        assert!(is_there || !was_there, "a checkpoint is gone");
        was_there = is_there;
    }
    finish(start(folder.path(), "killed", steps));
    // Nothing is left but the newest: neither what was not complete nor what was about to be removed.
    let left = fs::read_dir(folder.path().join("killed/checkpoints")).expect("the folder");
    let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(left, [format!("step-{steps:08}").as_str()]);
    let weights = |out: &str| fs::read(folder.path().join(out)).expect("the weights");
    assert!(weights("killed.safetensors") == weights("whole.safetensors"), "other weights");
}
