use super::*;

const SECRET: (&str, &str) = ("PYROCLAST_JOB_SECRET", "0123456789abcdef");

fn read(variables: &[(&str, &str)]) -> Result<Environment, Vec<Mistake>> {
    let find = |name: &str| variables.iter().rev().find(|(known, _)| *known == name);
    Environment::read(|name| find(name).map(|(_, value)| (*value).to_owned()))
}

fn process(variables: &[(&str, &str)]) -> ProcessRank {
    let environment = read(variables).expect("a valid environment");
    environment.process.expect("this process should be a rank")
}

#[test]
fn without_a_rank_ranks_are_threads() {
    let nothing = read(&[]).expect("an empty environment");
    assert!(nothing.process.is_none());
    assert_eq!(nothing.group_options().timeout, GroupOptions::default().timeout);
    // A secret or a master may be left in a shell's environment.
    let left = [SECRET, ("MASTER_ADDR", "10.0.0.1"), ("PYROCLAST_TIMEOUT", "0.5")];
    let environment = read(&left).expect("a valid environment");
    assert!(environment.process.is_none());
    assert_eq!(environment.group_options().timeout, Duration::from_millis(500));
}

#[test]
fn places_on_the_machine_follow_from_the_master() {
    let base = [("RANK", "5"), ("WORLD_SIZE", "6"), SECRET];
    type Variables = &'static [(&'static str, &'static str)];
    let table: [(Variables, (usize, usize), &str); 7] = [
        (&[], (5, 6), "127.0.0.1:29500"),
        (&[("MASTER_ADDR", "localhost")], (5, 6), "localhost:29500"),
        (&[("MASTER_ADDR", "::1"), ("MASTER_PORT", "7")], (5, 6), "[::1]:7"),
        (&[("MASTER_ADDR", "node0")], (0, 1), "node0:29500"),
        (&[("MASTER_ADDR", "10.0.0.1"), ("LOCAL_WORLD_SIZE", "2")], (1, 2), "10.0.0.1:29500"),
        (&[("LOCAL_WORLD_SIZE", "3"), ("LOCAL_RANK", "0")], (0, 3), "127.0.0.1:29500"),
        (&[("LOCAL_RANK", "4")], (4, 6), "127.0.0.1:29500"),
    ];
    for (more, local, master) in table {
        let process = process(&[&base[..], more].concat());
        assert_eq!((process.rank, process.world), (5, 6));
        assert_eq!((process.local_rank, process.local_world), local, "{more:?}");
        assert_eq!(process.master, master);
    }
}

#[test]
fn connections_are_set_by_variables() {
    let process = process(&[
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        SECRET,
        ("PYROCLAST_INTERFACE", "eth1"),
        ("PYROCLAST_SOCKETS", "4"),
        ("PYROCLAST_INTEGRITY", "keyed"),
        ("PYROCLAST_HEARTBEAT", "2.5"),
        ("PYROCLAST_TIMEOUT", "7"),
    ]);
    assert!(process.tcp.secret.is_some());
    assert_eq!(process.tcp.join_timeout, Duration::from_secs(7));
    assert_eq!(process.tcp.interface.as_deref(), Some("eth1"));
    assert_eq!(process.tcp.sockets_per_peer, 4);
    assert!(matches!(process.tcp.integrity, Integrity::Keyed));
    assert_eq!(process.tcp.heartbeat, Duration::from_millis(2500));
}

#[test]
fn a_secret_is_read_from_a_file_without_its_line_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("secret");
    let check = |content: &str| {
        std::fs::write(&path, content).expect("a file");
        let path = path.to_str().expect("a path in UTF-8");
        read(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("PYROCLAST_JOB_SECRET_FILE", path)])
    };
    assert!(check("0123456789abcdef\n").is_ok());
    let mistakes = check("0123456789abcde\n").expect_err("15 bytes");
    assert_eq!(mistakes[0].setting, "PYROCLAST_JOB_SECRET_FILE");
}

#[test]
fn every_inconsistency_is_refused_by_its_variable() {
    let base = [("RANK", "1"), ("WORLD_SIZE", "4"), SECRET];
    let table: [(&str, &str); 21] = [
        ("RANK", ""),
        ("RANK", "-1"),
        ("RANK", "4"),
        ("RANK", "one"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "1025"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("LOCAL_RANK", "4"),
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("PYROCLAST_JOB_SECRET", ""),
        ("PYROCLAST_JOB_SECRET", "fifteen bytes.."),
        ("PYROCLAST_JOB_SECRET_FILE", "both"),
        ("PYROCLAST_INTERFACE", ""),
        ("PYROCLAST_SOCKETS", "0"),
        ("PYROCLAST_SOCKETS", "17"),
        ("PYROCLAST_INTEGRITY", "none"),
        ("PYROCLAST_HEARTBEAT", "0.09"),
        ("PYROCLAST_TIMEOUT", "soon"),
    ];
    for (name, value) in table {
        let Err(mistakes) = read(&[&base[..], &[(name, value)]].concat()) else {
            panic!("{name}={value} was not refused")
        };
        assert_eq!(mistakes.len(), 1, "{name}={value}: {mistakes:?}");
        assert_eq!(mistakes[0].setting, name, "{mistakes:?}");
    }
}

#[test]
fn what_belongs_together_is_set_together() {
    let table: [(&[(&str, &str)], &str); 5] = [
        (&[("RANK", "0")], "RANK"),
        (&[("WORLD_SIZE", "2")], "WORLD_SIZE"),
        (&[("LOCAL_RANK", "0")], "LOCAL_RANK"),
        (&[("LOCAL_WORLD_SIZE", "1")], "LOCAL_WORLD_SIZE"),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1")],
            "PYROCLAST_JOB_SECRET",
        ),
    ];
    for (variables, name) in table {
        let Err(mistakes) = read(variables) else { panic!("{variables:?} was not refused") };
        assert_eq!(mistakes.len(), 1, "{mistakes:?}");
        assert_eq!(mistakes[0].setting, name, "{mistakes:?}");
    }
}

#[test]
fn all_mistakes_are_reported_together() {
    let variables =
        [("RANK", "9"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "x"), ("PYROCLAST_SOCKETS", "")];
    let mistakes = read(&variables).expect_err("three mistakes");
    assert_eq!(mistakes.len(), 3, "{mistakes:?}");
}
