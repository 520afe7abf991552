//! Packets back to back, ready to be sent by one system call.
//!
//! Invariants: the packets fill the buffer from its start without gaps; nothing is allocated after
//! `new`. Not here: their destination.

/// Packets back to back in one buffer. A sender gets them together, so that packets of equal size
/// can leave as one message, and a stream as one write.
pub struct Burst {
    bytes: Box<[u8]>,
    /// The end of each packet.
    ends: Box<[usize]>,
    packets: usize,
}

impl Burst {
    /// An empty burst with room for this many packets and bytes.
    #[must_use]
    pub fn new(packets_max: usize, bytes_max: usize) -> Self {
        let (bytes, ends) = (vec![0; bytes_max], vec![0; packets_max]);
        Burst { bytes: bytes.into_boxed_slice(), ends: ends.into_boxed_slice(), packets: 0 }
    }

    /// The room for the next packet; empty if all packets are in.
    pub fn space(&mut self) -> &mut [u8] {
        let start = if self.packets == self.ends.len() { self.bytes.len() } else { self.end() };
        &mut self.bytes[start..]
    }

    /// Makes the first `packet_bytes` of [`Burst::space`] a packet.
    ///
    /// # Panics
    /// If there is not that much room.
    pub fn commit(&mut self, packet_bytes: usize) {
        assert!(
            packet_bytes <= self.space().len(),
            "a packet of {packet_bytes} bytes does not fit into its burst"
        );
        let end = self.end() + packet_bytes;
        self.ends[self.packets] = end;
        self.packets += 1;
    }

    /// Appends a copy of this packet. Returns false if there is no room.
    #[must_use]
    pub fn push(&mut self, packet: &[u8]) -> bool {
        let Some(room) = self.space().get_mut(..packet.len()).filter(|room| !room.is_empty())
        else {
            return false;
        };
        room.copy_from_slice(packet);
        self.commit(packet.len());
        true
    }

    /// Removes all packets.
    pub fn clear(&mut self) {
        self.packets = 0;
    }

    /// The number of packets.
    #[must_use]
    pub fn len(&self) -> usize {
        self.packets
    }

    /// Whether there is no packet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// One packet.
    #[must_use]
    pub fn packet(&self, index: usize) -> &[u8] {
        self.span(index, index + 1)
    }

    /// Packets `from..to`, back to back.
    pub(super) fn span(&self, from: usize, to: usize) -> &[u8] {
        let start = if from == 0 { 0 } else { self.ends[from - 1] };
        &self.bytes[start..self.ends[..self.packets][to - 1]]
    }

    /// The end of the run of packets that starts at `from`: equal in size, except for a shorter
    /// last one, and within these limits.
    pub(super) fn run_end(&self, from: usize, packets_max: usize, bytes_max: usize) -> usize {
        let size = self.packet(from).len();
        let mut bytes = size;
        for next in from + 1..self.packets.min(from + packets_max) {
            let next_bytes = self.packet(next).len();
            if next_bytes > size || bytes + next_bytes > bytes_max {
                return next;
            }
            if next_bytes < size {
                return next + 1;
            }
            bytes += next_bytes;
        }
        self.packets.min(from + packets_max)
    }

    fn end(&self) -> usize {
        if self.packets == 0 { 0 } else { self.ends[self.packets - 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn burst_of(sizes: &[usize]) -> Burst {
        let mut burst = Burst::new(sizes.len(), sizes.iter().sum());
        for (i, &size) in sizes.iter().enumerate() {
            assert!(burst.push(&vec![i as u8; size]));
        }
        burst
    }

    #[test]
    fn packets_lie_back_to_back_and_come_out_as_they_went_in() {
        let mut burst = burst_of(&[24, 100, 30]);
        assert_eq!((burst.len(), burst.packet(1)), (3, &[1; 100][..]));
        assert_eq!(burst.span(0, 3).len(), 154);
        burst.clear();
        assert!(burst.is_empty());
        burst.space()[..2].copy_from_slice(b"ab");
        burst.commit(2);
        assert_eq!(burst.packet(0), b"ab");
    }

    #[test]
    fn a_burst_takes_no_more_packets_and_no_more_bytes_than_it_was_made_for() {
        let mut burst = Burst::new(2, 100);
        assert!(!burst.push(&[0; 101]));
        assert!(burst.push(&[0; 60]) && !burst.push(&[0; 41]) && burst.push(&[0; 30]));
        assert!(burst.space().is_empty(), "all packets are there");
        assert!(!burst.push(&[0; 1]));
    }

    #[test]
    fn a_run_is_of_equal_packets_and_a_shorter_last_one() {
        let burst = burst_of(&[50, 50, 30, 50, 60, 60, 60]);
        let ends: Vec<_> = (0..7).map(|from| burst.run_end(from, 64, 65000)).collect();
        assert_eq!(ends, [3, 3, 3, 4, 7, 7, 7]);
        assert_eq!(
            (burst.run_end(4, 2, 65000), burst.run_end(4, 64, 120), burst.run_end(4, 1, 1)),
            (6, 6, 5)
        );
    }
}
