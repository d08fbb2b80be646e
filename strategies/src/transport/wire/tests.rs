use half::{bf16, f16};

use super::*;

fn description(operation: Operation, dtype: Dtype) -> Description {
    let unit = (operation == Operation::AllGather).then_some(5);
    Description { operation, group: GroupId(7), sequence: 1 << 40, elements: 3, dtype, unit }
}

fn frames() -> Vec<Frame> {
    let operations = [
        Operation::AllReduce(ReduceOp::Sum),
        Operation::RingAllReduce(ReduceOp::Mean),
        Operation::ReduceScatter(ReduceOp::Min),
        Operation::Reduce { op: ReduceOp::Max, root: 2 },
        Operation::AllReduce(ReduceOp::Product),
        Operation::AllGather,
        Operation::AllGatherUneven,
        Operation::Broadcast { root: 0 },
        Operation::Gather { root: 1 },
        Operation::Scatter { root: 3 },
        Operation::AllToAll,
        Operation::Barrier,
        Operation::Send,
    ];
    let pool = Pool::default();
    let payloads = [
        (Dtype::F32, pool.copy_of(&[1.5f32, f32::NAN, -0.0])),
        (Dtype::F64, pool.copy_of(&[1.5f64, f64::INFINITY])),
        (Dtype::F16, pool.copy_of(&[f16::from_f32(0.1)])),
        (Dtype::Bf16, pool.copy_of(&[bf16::from_f32(0.1); 3])),
        (Dtype::I32, pool.copy_of(&[i32::MIN, 5])),
        (Dtype::I64, pool.copy_of(&[i64::MAX])),
        (Dtype::U8, pool.copy_of(&[0u8; 0])),
    ];
    operations
        .into_iter()
        .zip(payloads.into_iter().cycle())
        // A half-precision collective whose partial results are f32 is among them.
        .map(|(operation, (dtype, payload))| {
            let dtype = if operation == Operation::Barrier { Dtype::F16 } else { dtype };
            Frame { description: description(operation, dtype), payload }
        })
        .collect()
}

fn seals() -> [Seal; 2] {
    [Seal::crc(), Seal::keyed([3; 32])]
}

fn written(seal: &Seal, frames: &[Frame]) -> Vec<u8> {
    let mut wire = Vec::new();
    let mut stream = Stream::new(seal.clone(), &Pool::default());
    frames.iter().for_each(|frame| stream.write(&mut wire, frame.clone()).expect("a frame"));
    wire
}

fn first_of(seal: &Seal, mut wire: &[u8]) -> Result<Frame, WireError> {
    Stream::new(seal.clone(), &Pool::default()).read(&mut wire)
}

#[test]
fn every_operation_and_type_survives_the_wire() {
    for seal in seals() {
        let wire = written(&seal, &frames());
        let (mut wire, mut stream) = (&wire[..], Stream::new(seal, &Pool::default()));
        for sent in frames() {
            let received = stream.read(&mut wire).expect("a frame");
            assert_eq!(received.description, sent.description);
            // NaN is not equal to itself, its bytes are.
            assert_eq!(received.payload.bytes(), sent.payload.bytes());
        }
        assert!(matches!(stream.read(&mut wire), Err(WireError::Closed)));
    }
}

/// A writer that takes a few bytes at a time, and a reader that gives as few.
struct Trickle<'a>(Vec<u8>, &'a [u8]);

impl Write for Trickle<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(5);
        self.0.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Trickle<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = into.len().min(3);
        self.1.read(&mut into[..len])
    }
}

#[test]
fn frames_may_come_in_pieces() {
    let mut writer = Trickle(vec![], &[]);
    let mut stream = Stream::new(Seal::crc(), &Pool::default());
    frames().into_iter().for_each(|frame| stream.write(&mut writer, frame).expect("a frame"));
    assert_eq!(writer.0, written(&Seal::crc(), &frames()));
    let mut stream = Stream::new(Seal::crc(), &Pool::default());
    let mut reader = Trickle(vec![], &writer.0);
    for sent in frames() {
        let received = stream.read(&mut reader).expect("a frame");
        assert_eq!(received.description, sent.description);
    }
}

#[test]
fn every_flipped_bit_is_noticed() {
    let frame = &frames()[..1];
    for seal in seals() {
        let wire = written(&seal, frame);
        for bit in 0..wire.len() * 8 {
            let mut damaged = wire.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let outcome = first_of(&seal, &damaged);
            assert!(matches!(outcome, Err(WireError::Damaged(_))), "bit {bit}: {outcome:?}");
        }
    }
}

#[test]
fn lost_repeated_and_forged_frames_are_noticed() {
    let frame = &frames()[..1];
    for seal in seals() {
        let once = written(&seal, frame);
        let twice = written(&seal, &[frame, frame].concat());
        let lost = first_of(&seal, &twice[once.len()..]).expect_err("the first is missing");
        assert!(lost.to_string().contains("lost"), "{lost}");
        let repeated = [&once[..], &once].concat();
        let (mut wire, mut stream) = (&repeated[..], Stream::new(seal, &Pool::default()));
        stream.read(&mut wire).expect("the first");
        assert!(stream.read(&mut wire).is_err(), "a repetition");
    }
    let forged = written(&Seal::keyed([4; 32]), frame);
    assert!(first_of(&Seal::keyed([3; 32]), &forged).is_err(), "another key");
}

/// Gives the header, and fails the test if anything is read after it.
struct HeaderOnly<'a>(&'a [u8]);

impl Read for HeaderOnly<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        assert!(!self.0.is_empty(), "the length was believed");
        self.0.read(into)
    }
}

#[test]
fn a_length_out_of_range_is_refused_before_anything_is_allocated() {
    for len in [MAX_FRAME_BYTES as u32 + 4, u32::MAX - 3, 5] {
        let mut wire = written(&Seal::crc(), &frames()[..1])[..HEADER_BYTES].to_vec();
        wire[12..16].copy_from_slice(&len.to_le_bytes());
        // Under a right tag, as a lying member would send it.
        let tag = Seal::crc().tag(Part::Header, &wire[..FIELDS + TAG_BYTES]);
        wire[FIELDS + TAG_BYTES..].copy_from_slice(tag.as_bytes());
        let outcome = Stream::new(Seal::crc(), &Pool::default()).read(&mut HeaderOnly(&wire));
        assert!(matches!(outcome, Err(WireError::Damaged(_))), "{len}: {outcome:?}");
    }
}

#[test]
fn a_stream_that_ends_within_a_frame_is_broken_not_closed() {
    let wire = written(&Seal::crc(), &frames()[..1]);
    assert!(matches!(first_of(&Seal::crc(), &[]), Err(WireError::Closed)));
    for end in 1..wire.len() {
        let outcome = first_of(&Seal::crc(), &wire[..end]);
        assert!(matches!(outcome, Err(WireError::Io(_))), "{end} bytes: {outcome:?}");
    }
}
