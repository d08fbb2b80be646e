use std::io::{PipeReader, PipeWriter, pipe};
use std::thread;

use super::*;

/// One end of a connection without a network.
struct End(PipeReader, PipeWriter);

impl Read for End {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for End {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.1.flush()
    }
}

fn ends() -> (End, End) {
    let (a_reader, b_writer) = pipe().expect("a pipe");
    let (b_reader, a_writer) = pipe().expect("a pipe");
    (End(a_reader, a_writer), End(b_reader, b_writer))
}

fn secret(text: &str) -> JobSecret {
    JobSecret::new(text).expect("a secret of 16 bytes or more")
}

fn claim() -> Claim {
    Claim {
        purpose: Purpose::Frames(3),
        rank: 1,
        peer: 2,
        world: 4,
        job: [9; 16],
        settings: Settings { sockets: 5, integrity: 2, heartbeat: 30_000 },
    }
}

type Outcomes = (Result<Keys, HandshakeError>, Result<(Claim, Keys), HandshakeError>);

fn handshake(
    initiator: &JobSecret,
    acceptor: &JobSecret,
    admit: impl FnOnce(&Claim) -> Result<(), Refusal> + Send,
) -> Outcomes {
    let (mut here, mut there) = ends();
    thread::scope(|scope| {
        // Owned by the thread, so that a failed acceptor closes its end.
        let accepting = scope.spawn(move || accept(&mut there, acceptor, admit));
        let initiated = initiate(&mut here, initiator, &claim());
        drop(here);
        (initiated, accepting.join().expect("no panic"))
    })
}

#[test]
fn members_agree_on_keys_and_the_claim_arrives() {
    let (here, there) =
        handshake(&secret("0123456789abcdef"), &secret("0123456789abcdef"), |_| Ok(()));
    let (here, (received, there)) = (here.expect("keys"), there.expect("a claim and keys"));
    assert_eq!(received, claim());
    assert!(here.outgoing == there.incoming && here.incoming == there.outgoing);
    assert_ne!(here.outgoing, here.incoming, "each direction has a key of its own");
}

#[test]
fn another_secret_is_refused_without_a_word() {
    for (initiator, acceptor) in [
        (secret("0123456789abcdef"), secret("0123456789abcdeg")),
        (JobSecret::open(), secret("0123456789abcdef")),
        (secret("0123456789abcdef"), JobSecret::open()),
    ] {
        let (here, there) =
            handshake(&initiator, &acceptor, |_| panic!("nobody is to be admitted"));
        assert!(matches!(here, Err(HandshakeError::Closed)), "{here:?}");
        assert!(matches!(there, Err(HandshakeError::WrongSecret)), "{there:?}");
    }
}

#[test]
fn a_refused_member_learns_why() {
    for refusal in [
        Refusal::OtherWorld(8),
        Refusal::OtherJob,
        Refusal::OtherRank(3),
        Refusal::Taken,
        Refusal::OtherSettings,
    ] {
        let secret = secret("0123456789abcdef");
        let (here, _) = handshake(&secret, &secret, move |_| Err(refusal));
        assert!(matches!(here, Err(HandshakeError::Refused(r)) if r == refusal), "{here:?}");
    }
}

#[test]
fn an_acceptor_that_does_not_know_the_secret_is_noticed() {
    let (mut here, mut there) = ends();
    let outcome = thread::scope(|scope| {
        scope.spawn(move || {
            let mut hello = [0; HELLO];
            there.read_exact(&mut hello).expect("a hello");
            there.write_all(&[1; 32]).expect("a nonce");
            let mut message = [0; CLAIM + 32];
            there.read_exact(&mut message).expect("a claim");
            // "Accepted", with its own proof sent back.
            let proof = &message[CLAIM..];
            there.write_all(&[&[0; VERDICT], proof].concat()).expect("an answer");
        });
        initiate(&mut here, &secret("0123456789abcdef"), &claim())
    });
    assert!(matches!(outcome, Err(HandshakeError::WrongSecret)), "{outcome:?}");
}

#[test]
fn a_recorded_handshake_cannot_be_replayed() {
    let secret = secret("0123456789abcdef");
    let (mut here, mut there) = ends();
    let recorded = thread::scope(|scope| {
        let secret = &secret;
        let initiating = scope.spawn(move || initiate(&mut here, secret, &claim()));
        let mut hello = [0; HELLO];
        there.read_exact(&mut hello).expect("a hello");
        there.write_all(&[1; 32]).expect("a nonce");
        let mut message = [0; CLAIM + 32];
        there.read_exact(&mut message).expect("a claim");
        drop(there);
        assert!(initiating.join().expect("no panic").is_err());
        [&hello[..], &message].concat()
    });
    let (mut here, mut there) = ends();
    here.write_all(&recorded).expect("the recording");
    let outcome = accept(&mut there, &secret, |_| panic!("nobody is to be admitted"));
    assert!(matches!(outcome, Err(HandshakeError::WrongSecret)), "{outcome:?}");
}

#[test]
fn strangers_are_turned_away() {
    for hello in [&b"GET / HTTP/1.1\r\nHost: somebody.example\r\n\r\n"[..], &[0; 64], &[255; 64]] {
        let (mut here, mut there) = ends();
        here.write_all(hello).expect("bytes");
        let outcome = accept(&mut there, &JobSecret::open(), |_| Ok(()));
        assert!(matches!(outcome, Err(HandshakeError::NotAMember)), "{outcome:?}");
    }
    let (here, mut there) = ends();
    drop(here);
    assert!(accept(&mut there, &JobSecret::open(), |_| Ok(())).is_err());
}

#[test]
fn claims_and_verdicts_survive_the_wire() {
    for purpose in [Purpose::Store, Purpose::Control, Purpose::Frames(0), Purpose::Frames(65535)] {
        let claim = Claim { purpose, ..claim() };
        assert_eq!(Claim::decode(&claim.encode()), Some(claim));
    }
    let mut unknown = claim().encode();
    unknown[0] = 4;
    assert_eq!(Claim::decode(&unknown), None);
    assert!(decode_verdict(&[6, 0, 0, 0, 0]).is_err());
}
