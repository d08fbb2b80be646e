//! What must hold for any bytes from a peer.

use std::io::{self, Read, Write};

use pyroclast_strategies::membership::JobSecret;
use pyroclast_strategies::membership::handshake::{
    Claim, HandshakeError, Purpose, Settings, accept, initiate,
};
use pyroclast_strategies::transport::integrity::Seal;
use pyroclast_strategies::transport::wire::Stream;
use pyroclast_strategies::transport::{MAX_FRAME_BYTES, Pool};

/// Bytes of a header before its tags.
const FIELDS: usize = 48;

/// Reads frames until the first error: as the bytes are, and under tags that are right, as a member
/// that lies would send them. What can be read has the bytes that it was read from.
pub fn frames(data: &[u8]) {
    for seal in [Seal::crc(), Seal::keyed([7; 32])] {
        read_all(&seal, data);
    }
    if let Some((fields, payload)) = data.split_at_checked(FIELDS) {
        let payload_tag = tag(payload);
        let header = [fields, &payload_tag].concat();
        let wire = [&header[..], &tag(&header), payload].concat();
        read_all(&Seal::crc(), &wire);
    }
}

fn read_all(seal: &Seal, data: &[u8]) {
    let mut rest = data;
    let pool = Pool::default();
    let new = || Stream::new(seal.clone(), &pool);
    let (mut reader, mut writer) = (new(), new());
    let mut written = vec![];
    while let Ok(frame) = reader.read(&mut rest) {
        assert!(frame.payload.bytes().len() <= MAX_FRAME_BYTES);
        writer.write(&mut written, frame).expect("a vector takes everything");
    }
    assert!(data.starts_with(&written), "what was read is not what was sent");
}

/// The tag of bytes that are only checked for accidents.
fn tag(bytes: &[u8]) -> [u8; 32] {
    let mut tag = [0; 32];
    tag[..4].copy_from_slice(&crc32fast::hash(bytes).to_le_bytes());
    tag
}

/// Shakes hands with a peer that sends these bytes. Nobody is let in who does not know the secret, and
/// a claim that a member proves arrives as it was sent.
pub fn handshake(data: &[u8]) {
    let secret = JobSecret::new(SECRET).expect("a secret of 16 bytes or more");
    let mut stranger = Replay(data);
    let outcome = accept(&mut stranger, &secret, |_| panic!("a stranger was let in"));
    assert!(outcome.is_err());
    let claim = Claim {
        purpose: Purpose::Control,
        rank: 1,
        peer: 0,
        world: 2,
        job: [1; 16],
        settings: Settings::default(),
    };
    assert!(initiate(&mut Replay(data), &secret, &claim).is_err(), "a stranger was believed");

    let mut member = Member::new(data);
    match accept(&mut member, &secret, |_| Ok(())) {
        Ok((claim, _)) => assert_eq!(member.claim[6..10], claim.rank.to_le_bytes()),
        Err(HandshakeError::NotAMember) => {}
        Err(error) => panic!("a member was not understood: {error}"),
    }
}

const SECRET: &[u8] = b"a secret for fuzzing";
const HELLO: usize = 42;
const CLAIM: usize = 38;

/// A peer that sends what it sends, whatever it hears.
struct Replay<'a>(&'a [u8]);

impl Read for Replay<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Replay<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A peer that knows the secret, and claims what the data says.
struct Member {
    hello: [u8; HELLO],
    claim: [u8; CLAIM],
    to_send: Vec<u8>,
    is_proved: bool,
}

impl Member {
    fn new(data: &[u8]) -> Self {
        let mut hello = [5; HELLO];
        hello[..8].copy_from_slice(b"pyroclst");
        hello[8..10].copy_from_slice(&1u16.to_le_bytes());
        let mut claim = [0; CLAIM];
        let len = data.len().min(CLAIM);
        claim[..len].copy_from_slice(&data[..len]);
        Self { hello, claim, to_send: hello.to_vec(), is_proved: false }
    }
}

impl Read for Member {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = into.len().min(self.to_send.len());
        into[..len].copy_from_slice(&self.to_send[..len]);
        self.to_send.drain(..len);
        Ok(len)
    }
}

impl Write for Member {
    fn write(&mut self, nonce: &[u8]) -> io::Result<usize> {
        if !self.is_proved {
            let key = blake3::derive_key("pyroclast 2026-11 job secret", SECRET);
            let mut proof = blake3::Hasher::new_keyed(&key);
            proof.update(b"initiator").update(&self.hello).update(nonce).update(&self.claim);
            self.to_send.extend_from_slice(&self.claim);
            self.to_send.extend_from_slice(proof.finalize().as_bytes());
            self.is_proved = true;
        }
        Ok(nonce.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
