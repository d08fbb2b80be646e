use std::net::Ipv4Addr;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::*;
use crate::membership::dial::Dial;
use crate::membership::handshake::{Purpose, Settings};

/// Lets everybody in.
struct Open(Sender<Member>);

impl Host for Open {
    fn admit(&self, _claim: &Claim) -> Result<(), Refusal> {
        Ok(())
    }

    fn welcome(&self, member: Member) {
        let _ = self.0.send(member);
    }
}

fn open(secret: &JobSecret) -> (Door, Receiver<Member>) {
    let (members, arrived) = unbounded();
    let address = (Ipv4Addr::LOCALHOST, 0).into();
    (Door::open(address, "", secret, Arc::new(Open(members))).expect("a door"), arrived)
}

fn secret() -> JobSecret {
    JobSecret::new("0123456789abcdef").expect("a secret")
}

fn dial(door: &Door, secret: &JobSecret) -> Result<(TcpStream, Keys), Error> {
    let claim = Claim {
        purpose: Purpose::Control,
        rank: 1,
        peer: 0,
        world: 2,
        job: [0; 16],
        settings: Settings::default(),
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let may_go_on = &|| Ok(());
    Dial { address: door.address(), from: None, secret, deadline, may_go_on }.connect(&claim)
}

#[test]
fn members_are_let_in_and_strangers_learn_nothing() {
    let (door, arrived) = open(&secret());
    let error = dial(&door, &JobSecret::open()).expect_err("no member").to_string();
    assert!(error.contains("rank 0 at 127.0.0.1") && error.contains("secret"), "{error}");
    // Not a byte comes back to who does not speak the protocol.
    let mut stranger = TcpStream::connect(door.address()).expect("a connection");
    stranger.write_all(&[b'x'; 64]).expect("bytes");
    let mut heard = vec![];
    // Closing a socket that has unread bytes may look like a reset.
    let _ = stranger.read_to_end(&mut heard);
    assert!(heard.is_empty(), "{heard:?}");
    dial(&door, &secret()).expect("a member");
    assert_eq!(arrived.recv().expect("the member").claim.rank, 1);
    assert!(arrived.try_recv().is_err(), "nobody else was let in");
}

#[test]
fn silent_strangers_keep_nobody_out() {
    let (door, arrived) = open(&secret());
    let silent: Vec<TcpStream> = (0..2 * MAX_STRANGERS)
        .map(|_| TcpStream::connect(door.address()).expect("a connection"))
        .collect();
    dial(&door, &secret()).expect("a member among strangers");
    arrived.recv().expect("the member");
    // The oldest were dropped to make room.
    let mut oldest = &silent[0];
    assert!(matches!(oldest.read(&mut [0]), Ok(0) | Err(_)));
    assert!(door.strangers.streams().len() <= MAX_STRANGERS);
}

#[test]
fn a_listener_beyond_this_machine_needs_a_secret() {
    let everywhere = (Ipv4Addr::UNSPECIFIED, 0).into();
    let (members, _) = unbounded();
    let error = Door::open(everywhere, "", &JobSecret::open(), Arc::new(Open(members.clone())))
        .expect_err("no secret")
        .to_string();
    assert!(error.contains("PYROCLAST_JOB_SECRET") && error.contains("urandom"), "{error}");
    Door::open(everywhere, "", &secret(), Arc::new(Open(members)))
        .expect("with a secret it listens");
}

#[test]
fn a_closed_door_is_no_longer_there() {
    let (door, _) = open(&secret());
    let address = door.address();
    drop(door);
    assert!(TcpStream::connect(address).is_err());
}
