//! Frames as bytes.
//!
//! ```text
//! offset  bytes
//!      0      4  magic "pyrf"
//!      4      1  operation
//!      5      1  reduction, 255 if there is none
//!      6      1  dtype of the collective
//!      7      1  dtype of the payload: half precision may travel as f32
//!      8      2  root, all ones if there is none
//!     10      2  unit of the model, all ones if there is none
//!     12      4  bytes of the payload
//!     16      8  group
//!     24      8  sequence number of the collective
//!     32      8  elements of the whole buffer
//!     40      8  number of the frame in this direction of this connection, from 0
//!     48     32  tag of the payload
//!     80     32  tag of the bytes before
//!    112         payload
//! ```
//!
//! Integers and payloads are little-endian. The header's tag is checked before its length is believed,
//! and the length is limited before anything is allocated. The frame's number is under the tag: a frame
//! that was lost, repeated or reordered is noticed as a damaged one is.

use std::io::{self, IoSlice, Read, Write};

use super::integrity::{Part, Seal, TAG_BYTES};
use super::{Frame, MAX_FRAME_BYTES, Payload, Pool};
use crate::collectives::ReduceOp;
use crate::description::{Description, Dtype, GroupId, Operation};

#[cfg(target_endian = "big")]
compile_error!("frames carry numbers as they lie in memory, little-endian");

const MAGIC: &[u8; 4] = b"pyrf";
const FIELDS: usize = 48;
/// Bytes before a payload.
pub const HEADER_BYTES: usize = FIELDS + 2 * TAG_BYTES;

/// Why no frame could be read.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The stream ended between two frames.
    #[error("the connection was closed")]
    Closed,
    /// The stream ended within a frame, or failed.
    #[error("the connection broke: {0}")]
    Io(io::Error),
    /// Bytes that the peer did not send.
    #[error("{0}")]
    Damaged(&'static str),
}

/// What tells a frame from all others of its direction, apart from its payload: the first bytes of its
/// header.
type Fields = [u8; FIELDS];

/// Numbers the frames of one direction of a connection, and makes and checks their tags.
#[derive(Clone, Debug)]
pub(crate) struct Stamper {
    seal: Seal,
    number: u64,
}

/// The tags of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    payload: blake3::Hash,
    header: blake3::Hash,
}

impl Stamper {
    pub(crate) fn new(seal: Seal) -> Self {
        Self { seal, number: 0 }
    }

    /// Stamps the next frame that is sent.
    pub(crate) fn stamp(&mut self, frame: &Frame) -> Stamp {
        self.stamp_with_fields(frame).1
    }

    fn stamp_with_fields(&mut self, frame: &Frame) -> (Fields, Stamp) {
        let fields = self.fields(frame);
        let payload = self.seal.tag(Part::Payload, frame.payload.bytes());
        let header = self.header_tag(&fields, payload);
        self.number += 1;
        (fields, Stamp { payload, header })
    }

    /// Checks the next frame that is received.
    pub(crate) fn check(
        &mut self,
        frame: &Frame,
        stamp: Option<&Stamp>,
    ) -> Result<(), &'static str> {
        let stamp = stamp.ok_or("a frame has no tag")?;
        if stamp.payload != self.seal.tag(Part::Payload, frame.payload.bytes()) {
            return Err(DAMAGED_PAYLOAD);
        }
        if stamp.header != self.header_tag(&self.fields(frame), stamp.payload) {
            return Err("a frame was lost, repeated or reordered, or its header is damaged");
        }
        self.number += 1;
        Ok(())
    }

    fn fields(&self, frame: &Frame) -> Fields {
        let mut fields = encode(&frame.description, &frame.payload);
        fields[40..].copy_from_slice(&self.number.to_le_bytes());
        fields
    }

    fn header_tag(&self, fields: &Fields, payload: blake3::Hash) -> blake3::Hash {
        let mut header = [0; FIELDS + TAG_BYTES];
        header[..FIELDS].copy_from_slice(fields);
        header[FIELDS..].copy_from_slice(payload.as_bytes());
        self.seal.tag(Part::Header, &header)
    }
}

const DAMAGED_PAYLOAD: &str = "a frame's payload is damaged";

/// One direction of a connection.
#[derive(Clone, Debug)]
pub struct Stream {
    stamper: Stamper,
    pool: Pool,
}

impl Stream {
    /// A new connection's direction. Payloads come from and go to `pool`.
    #[must_use]
    pub fn new(seal: Seal, pool: &Pool) -> Self {
        Self { stamper: Stamper::new(seal), pool: pool.clone() }
    }

    /// Writes a frame, its payload without copying it.
    ///
    /// # Errors
    ///
    /// Those of the writer.
    pub fn write(&mut self, writer: &mut impl Write, frame: Frame) -> io::Result<()> {
        let (fields, stamp) = self.stamper.stamp_with_fields(&frame);
        let mut header = [0; HEADER_BYTES];
        header[..FIELDS].copy_from_slice(&fields);
        header[FIELDS..FIELDS + TAG_BYTES].copy_from_slice(stamp.payload.as_bytes());
        header[FIELDS + TAG_BYTES..].copy_from_slice(stamp.header.as_bytes());
        write_both(writer, &header, frame.payload.bytes())?;
        self.pool.put(frame.payload);
        Ok(())
    }

    /// Reads the next frame.
    ///
    /// # Errors
    ///
    /// [`WireError`].
    pub fn read(&mut self, reader: &mut impl Read) -> Result<Frame, WireError> {
        let stamper = &mut self.stamper;
        let header = read_header(reader)?;
        let (tagged, tag) = header.split_at(FIELDS + TAG_BYTES);
        if stamper.seal.tag(Part::Header, tagged) != tag_at(tag) {
            return Err(WireError::Damaged("a frame's header is damaged"));
        }
        let (description, dtype, len) =
            decode(tagged).ok_or(WireError::Damaged("a frame's header makes no sense"))?;
        if tagged[40..FIELDS] != stamper.number.to_le_bytes() {
            return Err(WireError::Damaged("a frame was lost, repeated or reordered"));
        }
        let mut payload = self.pool.take(dtype, len);
        reader.read_exact(payload.bytes_mut()).map_err(WireError::Io)?;
        if stamper.seal.tag(Part::Payload, payload.bytes()) != tag_at(&tagged[FIELDS..]) {
            return Err(WireError::Damaged(DAMAGED_PAYLOAD));
        }
        stamper.number += 1;
        Ok(Frame { description, payload })
    }
}

fn tag_at(bytes: &[u8]) -> blake3::Hash {
    let mut tag = [0; TAG_BYTES];
    tag.copy_from_slice(&bytes[..TAG_BYTES]);
    blake3::Hash::from_bytes(tag)
}

/// Writes header and payload in one call where the system takes them.
fn write_both(writer: &mut impl Write, mut header: &[u8], mut payload: &[u8]) -> io::Result<()> {
    while !header.is_empty() || !payload.is_empty() {
        let written = match writer.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let of_header = written.min(header.len());
        header = &header[of_header..];
        payload = &payload[written - of_header..];
    }
    Ok(())
}

/// Tells a stream that ends between frames from one that ends within a frame.
fn read_header(reader: &mut impl Read) -> Result<[u8; HEADER_BYTES], WireError> {
    let mut header = [0; HEADER_BYTES];
    let first = loop {
        match reader.read(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => break read.map_err(WireError::Io)?,
        }
    };
    if first == 0 {
        return Err(WireError::Closed);
    }
    reader.read_exact(&mut header[first..]).map_err(WireError::Io)?;
    Ok(header)
}

/// All fields but the frame's number.
fn encode(description: &Description, payload: &Payload) -> Fields {
    let Description { operation, group, sequence, elements, dtype, unit } = *description;
    let mut fields = [0; FIELDS];
    fields[..4].copy_from_slice(MAGIC);
    fields[4] = operation_code(operation);
    fields[5] = operation.reduce_op().map_or(u8::MAX, reduce_code);
    fields[6] = dtype_code(dtype);
    fields[7] = dtype_code(payload.dtype());
    // Jobs have far fewer ranks.
    let root = operation.root().map_or(u16::MAX, |root| root as u16);
    fields[8..10].copy_from_slice(&root.to_le_bytes());
    fields[10..12].copy_from_slice(&unit.unwrap_or(u16::MAX).to_le_bytes());
    fields[12..16].copy_from_slice(&(payload.bytes().len() as u32).to_le_bytes());
    fields[16..24].copy_from_slice(&group.0.to_le_bytes());
    fields[24..32].copy_from_slice(&sequence.to_le_bytes());
    fields[32..40].copy_from_slice(&(elements as u64).to_le_bytes());
    fields
}

/// Description, dtype and bytes of the payload, if they are ones that a rank can send.
fn decode(fields: &[u8]) -> Option<(Description, Dtype, usize)> {
    let half = |at: usize| Some(u16::from_le_bytes(fields.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_le_bytes(fields.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_le_bytes(fields.get(at..at + 8)?.try_into().ok()?));
    let (dtype, carried) = (dtype_from(fields[6])?, dtype_from(fields[7])?);
    let payload = word(12)? as usize;
    let is_whole = payload.is_multiple_of(carried.size());
    if fields.get(..4)? != MAGIC || payload > MAX_FRAME_BYTES || !is_whole {
        return None;
    }
    let description = Description {
        operation: operation_from(fields[4], fields[5], half(8)?)?,
        group: GroupId(long(16)?),
        sequence: long(24)?,
        elements: usize::try_from(long(32)?).ok()?,
        dtype,
        unit: half(10).filter(|unit| *unit != u16::MAX),
    };
    Some((description, carried, payload))
}

fn operation_code(operation: Operation) -> u8 {
    match operation {
        Operation::AllReduce(_) => 1,
        Operation::RingAllReduce(_) => 2,
        Operation::ReduceScatter(_) => 3,
        Operation::Reduce { .. } => 4,
        Operation::AllGather => 5,
        Operation::AllGatherUneven => 6,
        Operation::Broadcast { .. } => 7,
        Operation::Gather { .. } => 8,
        Operation::Scatter { .. } => 9,
        Operation::AllToAll => 10,
        Operation::Barrier => 11,
        Operation::Send => 12,
    }
}

fn operation_from(code: u8, op: u8, root: u16) -> Option<Operation> {
    let op = (op != u8::MAX).then_some(op);
    let root = (root != u16::MAX).then_some(usize::from(root));
    Some(match (code, op, root) {
        (1, Some(op), None) => Operation::AllReduce(reduce_from(op)?),
        (2, Some(op), None) => Operation::RingAllReduce(reduce_from(op)?),
        (3, Some(op), None) => Operation::ReduceScatter(reduce_from(op)?),
        (4, Some(op), Some(root)) => Operation::Reduce { op: reduce_from(op)?, root },
        (5, None, None) => Operation::AllGather,
        (6, None, None) => Operation::AllGatherUneven,
        (7, None, Some(root)) => Operation::Broadcast { root },
        (8, None, Some(root)) => Operation::Gather { root },
        (9, None, Some(root)) => Operation::Scatter { root },
        (10, None, None) => Operation::AllToAll,
        (11, None, None) => Operation::Barrier,
        (12, None, None) => Operation::Send,
        _ => return None,
    })
}

fn reduce_code(op: ReduceOp) -> u8 {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Mean => 1,
        ReduceOp::Min => 2,
        ReduceOp::Max => 3,
        ReduceOp::Product => 4,
    }
}

fn reduce_from(code: u8) -> Option<ReduceOp> {
    [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product]
        .get(usize::from(code))
        .copied()
}

fn dtype_code(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F64 => 1,
        Dtype::F16 => 2,
        Dtype::Bf16 => 3,
        Dtype::I32 => 4,
        Dtype::I64 => 5,
        Dtype::U8 => 6,
    }
}

fn dtype_from(code: u8) -> Option<Dtype> {
    [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16, Dtype::I32, Dtype::I64, Dtype::U8]
        .get(usize::from(code))
        .copied()
}

#[cfg(test)]
mod tests;
