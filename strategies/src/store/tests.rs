use std::net::Ipv4Addr;
use std::sync::Arc;
use std::thread;

use super::*;
use crate::membership::JobSecret;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn secret() -> JobSecret {
    JobSecret::new("0123456789abcdef").expect("a secret")
}

fn host() -> TcpStore {
    TcpStore::host((Ipv4Addr::LOCALHOST, 0).into(), 3, &secret()).expect("a store")
}

fn guest(host: &TcpStore, rank: usize) -> Result<TcpStore, Error> {
    TcpStore::join(host.local_address(), (rank, 3), &secret(), soon())
}

/// Every store as two ranks see it.
fn stores() -> Vec<(Arc<dyn Store>, Arc<dyn Store>)> {
    let memory = MemoryStore::default();
    let folder = tempfile::tempdir().expect("a folder").keep();
    let file = |folder| FileStore::open(folder).expect("a folder");
    let tcp = host();
    let joined = guest(&tcp, 1).expect("a guest");
    vec![
        (Arc::new(memory.clone()), Arc::new(memory)),
        (Arc::new(file(folder.clone())), Arc::new(file(folder))),
        (Arc::new(tcp), Arc::new(joined)),
    ]
}

#[test]
fn what_one_rank_sets_another_gets_even_if_it_asks_first() {
    for (here, there) in stores() {
        for (from, to) in [(&here, &there), (&there, &here)] {
            let name = if Arc::ptr_eq(from, &here) { "address/0" } else { "address/1" };
            thread::scope(|scope| {
                let waiting = scope.spawn(|| to.get(name, soon()));
                from.set(name, b"10.0.0.1:5").expect("a value");
                assert_eq!(waiting.join().expect("no panic"), Ok(b"10.0.0.1:5".to_vec()), "{to:?}");
            });
        }
        here.set("empty", &[]).expect("an empty value");
        assert_eq!(there.get("empty", soon()), Ok(vec![]));
    }
}

#[test]
fn a_value_is_set_once() {
    for (here, there) in stores() {
        here.set("address/2", b"first").expect("a value");
        let error = there.set("address/2", b"second").expect_err("it is taken").to_string();
        assert!(error.contains("RANK"), "{error}");
        assert_eq!(there.get("address/2", soon()), Ok(b"first".to_vec()));
    }
}

#[test]
fn what_nobody_sets_is_named_at_the_deadline() {
    for (_, there) in stores() {
        let error = there.get("address/2", Instant::now()).expect_err("nobody").to_string();
        assert!(error.contains("rank 2 did not join"), "{error}");
    }
}

#[test]
fn a_rank_that_fails_ends_the_wait_of_the_others() {
    for (here, there) in stores() {
        thread::scope(|scope| {
            assert_eq!(there.failure(), Ok(None));
            let waiting = scope.spawn(|| there.get("address/2", soon()));
            here.fail(2, &"too long ".repeat(MAX_VALUE));
            here.fail(1, "a second reason changes nothing");
            let error = waiting.join().expect("no panic").expect_err("rank 2 failed").to_string();
            assert!(error.starts_with("rank 2 failed while joining: too long"), "{error}");
            assert_eq!(there.failure(), Ok(Some(error)));
        });
    }
}

#[test]
fn names_and_values_out_of_range_are_refused() {
    for (here, there) in stores() {
        for store in [here, there] {
            for name in ["", "../escape", "a b", &"x".repeat(MAX_NAME + 1)] {
                assert!(store.set(name, b"value").is_err(), "{name}");
            }
            let error = store.set("value", &vec![0; MAX_VALUE + 1]).expect_err("too long");
            assert!(error.to_string().contains("16384"), "{error}");
        }
    }
}

#[test]
fn a_guest_that_cannot_be_one_learns_why() {
    let host = host();
    let _first = guest(&host, 1).expect("rank 1");
    let error = guest(&host, 1).expect_err("rank 1 again").to_string();
    assert!(error.contains("RANK must be different"), "{error}");
    let other_world = TcpStore::join(host.local_address(), (2, 4), &secret(), soon());
    let error = other_world.expect_err("another world").to_string();
    assert!(error.contains("WORLD_SIZE=3"), "{error}");
}

#[test]
fn a_guest_that_is_cut_off_ends_the_wait_for_it() {
    let host = host();
    drop(guest(&host, 1).expect("rank 1"));
    let error = host.get("address/1", soon()).expect_err("rank 1 is gone").to_string();
    assert!(error.starts_with("rank 1 failed while joining: its process ended"), "{error}");
}

#[test]
fn a_host_that_is_gone_is_noticed() {
    let host = host();
    let guest = guest(&host, 1).expect("rank 1");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| guest.get("address/2", soon()));
        drop(host);
        let error = waiting.join().expect("no panic").expect_err("the host is gone").to_string();
        // It may have asked before, or ask only now.
        let knows =
            error.contains("rank 0 failed while joining") || error.contains("rank 0's store");
        assert!(knows, "{error}");
    });
    let error = guest.failure().expect_err("the host is gone").to_string();
    assert!(error.contains("rank 0's store"), "{error}");
}

#[test]
fn a_folder_that_was_used_before_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = FileStore::open(folder.path()).expect("a store");
    first.set("address/0", b"10.0.0.1:5").expect("a value");
    let second = FileStore::open(folder.path()).expect("a store");
    let error = second.set("address/0", b"10.0.0.1:6").expect_err("used").to_string();
    assert!(error.contains("used before"), "{error}");
}
