//! `pyroclast bench` as a user types it.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pyroclast"))
        .arg("bench")
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the command should start")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn wrong_input_is_one_line_and_exit_code_2() {
    let table: &[(&[&str], &str)] = &[
        (&["kernels"], "`bench kernels` is not in this version; there is collectives"),
        (&["offload"], "`bench offload` is not in this version; there is collectives"),
        (&["colectives"], "unknown subject `colectives`; there is collectives"),
        (&["collectives", "--world=0"], "world: 0 is out of range; it must be 1 to 256"),
        (&["collectives", "--world=257"], "world: 257 is out of range"),
        (&["collectives", "--world=-1"], "--world"),
        (&["collectives", "--transport=ib"], "transport: unknown `ib`; there are memory, tcp"),
        (&["collectives", "--sockets=2"], "sockets: means nothing to the memory transport"),
        (&["collectives", "--transport=tcp", "--sockets=0"], "sockets: 0 is out of range"),
        (&["collectives", "--op=allreduce"], "op: unknown `allreduce`; there are all, all_reduce"),
        (&["collectives", "--op="], "op: unknown ``"),
        (&["collectives", "--sizes=4kb"], "sizes: `4kb` is no size"),
        (&["collectives", "--sizes=1KiB,,2KiB"], "sizes: `` is no size"),
        (&["collectives", "--sizes=6"], "sizes: 6 B is no multiple of the 4 bytes of f32"),
        (&["collectives", "--sizes=4", "--world=3"], "use a multiple of 12 B"),
        (&["collectives", "--sizes=99999GiB"], "is too large"),
        (&["collectives", "--dtype=f8"], "dtype: unknown `f8`; there are f32, f64"),
        (&["collectives", "--algorithm=tree"], "algorithm: unknown `tree`; there are auto, ring"),
        (&["collectives", "--algorithm=ring"], "use --op all_reduce,reduce_scatter"),
        (&["collectives", "--op=reduce_scatter", "--algorithm=doubling"], "use --op all_reduce"),
        (
            &["collectives", "--op=all_reduce", "--algorithm=hierarchical:2", "--world=3"],
            "algorithm: rows of 2 ranks do not divide 3 ranks",
        ),
        (&["collectives", "--op=all_reduce", "--algorithm=hierarchical:0"], "rows of 0 ranks"),
        (&["collectives", "--iterations=0"], "iterations: 0 is out of range"),
        (&["collectives", "--iterations=1", "--seconds=1"], "set one of them"),
        (&["collectives", "--seconds=0"], "seconds: 0 is out of range"),
        (&["collectives", "--format=xml"], "xml"),
    ];
    for (args, expected) in table {
        let output = bench(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
        assert!(said.starts_with("error: ") && said.contains(expected), "{args:?}: {said}");
        assert!(output.stdout.is_empty(), "{args:?} measured something");
    }
}

#[test]
fn all_mistakes_are_reported_together() {
    let output = bench(&["collectives", "--world=0", "--op=x", "--sizes=x", "--dtype=x"]);
    let said = text(&output.stderr);
    for setting in ["world:", "op:", "sizes:", "dtype:"] {
        assert!(said.contains(setting), "{setting} {said}");
    }
}

#[test]
fn machines_get_one_object_per_line_and_people_a_table() {
    let args = ["collectives", "--world=2", "--sizes=4KiB,64KiB", "--iterations=3"];
    let json = bench(&[&args[..], &["--op=all_reduce,all_to_all", "--format=json"]].concat());
    assert!(json.status.success(), "{}", text(&json.stderr));
    let rows: Vec<Value> =
        text(&json.stdout).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let lines: Vec<_> = rows.iter().map(|r| (r["op"].as_str(), r["bytes"].as_u64())).collect();
    let (all_reduce, all_to_all) = (Some("all_reduce"), Some("all_to_all"));
    let (small, large) = (Some(4 << 10), Some(64 << 10));
    assert_eq!(
        lines,
        [(all_reduce, small), (all_reduce, large), (all_to_all, small), (all_to_all, large)]
    );
    for row in &rows {
        assert_eq!((row["verified"].as_bool(), row["world"].as_u64()), (Some(true), Some(2)));
        assert!(row["fraction_of_limit"].as_f64().is_some_and(|f| f > 0.0), "{row}");
        assert!(row["rival"].is_null());
    }

    let table = bench(&[&args[..], &["--op=broadcast", "--dtype=bf16"]].concat());
    let said = text(&table.stdout);
    assert!(table.status.success() && said.contains("copies of"), "{said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("broadcast")).count(), 2, "{said}");
}
