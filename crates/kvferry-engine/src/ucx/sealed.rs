//! A checksum around what UCX packs and another UCX parses: worker addresses and remote keys.
//!
//! UCX parses both without being told their length, and answers damage with an assertion that ends
//! the process (an unknown address version) or by reading past the end. So bytes from a peer reach
//! UCX only if they are, bit for bit, what a kvferry's UCX packed. This guards against accidents;
//! somebody who forges a checksum is in the trust domain, or the trust domain is too large.

/// What a sealed thing starts with; the last byte is this format's version.
const MAGIC: [u8; 4] = *b"kvu1";

/// The magic and the checksum.
const HEADER_BYTES: usize = MAGIC.len() + size_of::<u64>();

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sealed {
    /// A worker's address.
    Address,
    /// A packed remote key.
    Key,
}

impl Sealed {
    fn name(self) -> &'static str {
        match self {
            Self::Address => "a UCX worker address",
            Self::Key => "a UCX remote key",
        }
    }

    /// Puts the checksum in front.
    pub(super) fn seal(self, bytes: &[u8]) -> Vec<u8> {
        let checksum = self.checksum(bytes).to_le_bytes();
        [MAGIC.as_slice(), &checksum, bytes].concat()
    }

    /// Takes it off again, or says why not.
    pub(super) fn open(self, sealed: &[u8]) -> Result<&[u8], String> {
        let (length, name) = (sealed.len(), self.name());
        let Some((header, bytes)) = sealed.split_at_checked(HEADER_BYTES) else {
            return Err(format!("{length} bytes are too few for {name}"));
        };
        let Some(checksum) = header.strip_prefix(&MAGIC) else {
            return Err(format!(
                "{length} bytes that do not start as {name} of kvferry does"
            ));
        };
        if checksum == self.checksum(bytes).to_le_bytes() && !bytes.is_empty() {
            Ok(bytes)
        } else {
            Err(format!("{length} bytes are {name} that was damaged"))
        }
    }

    /// FNV-1a, 64 bits, over the kind and the bytes.
    fn checksum(self, bytes: &[u8]) -> u64 {
        [self as u8]
            .iter()
            .chain(bytes)
            .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sealed_opens_and_nothing_else_does() {
        let bytes: Vec<u8> = (0..150).collect();
        let sealed = Sealed::Address.seal(&bytes);
        assert_eq!(sealed.len(), bytes.len() + 12);
        assert_eq!(Sealed::Address.open(&sealed), Ok(bytes.as_slice()));
        let refused = |bytes: &[u8]| Sealed::Address.open(bytes).unwrap_err();
        assert_eq!(
            Sealed::Key.open(&sealed).unwrap_err(),
            "162 bytes are a UCX remote key that was damaged"
        );
        for length in 0..sealed.len() {
            refused(&sealed[..length]);
        }
        for bit in 0..8 * sealed.len() {
            let mut damaged = sealed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            refused(&damaged);
        }
        refused(&[&sealed[..], &[0]].concat());
        refused(&Sealed::Address.seal(&[]));
        assert_eq!(
            refused(b"loopback"),
            "8 bytes are too few for a UCX worker address"
        );
        assert!(
            refused(&bytes).contains("do not start"),
            "{}",
            refused(&bytes)
        );
    }
}
