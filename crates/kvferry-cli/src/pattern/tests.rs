use super::*;

const HERE: Place = Place {
    request: 5,
    layer: 2,
    block: 9,
};

fn bytes(seed: u64, place: Place, count: usize) -> Vec<u8> {
    let mut out = vec![POISON; count];
    Pattern::new(seed).fill(place, &mut out);
    out
}

/// Bytes at which two blocks differ.
fn differing(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a != b).count()
}

#[test]
fn every_part_of_the_name_changes_nearly_every_byte() {
    let here = bytes(1, HERE, 4096);
    let others = [
        bytes(2, HERE, 4096),
        bytes(1, Place { request: 6, ..HERE }, 4096),
        bytes(1, Place { layer: 3, ..HERE }, 4096),
        bytes(1, Place { block: 8, ..HERE }, 4096),
        // Swapped parts are another place too.
        bytes(
            1,
            Place {
                layer: 9,
                block: 2,
                ..HERE
            },
            4096,
        ),
    ];
    for other in others {
        assert!(differing(&here, &other) > 4000);
    }
    // The same bytes, shifted by a word or a byte.
    assert!(differing(&here[8..], &here) > 4000);
    assert!(differing(&here[1..], &here) > 4000);
    assert_eq!(here, bytes(1, HERE, 4096));
}

#[test]
fn blocks_of_any_length_are_filled_to_their_end() {
    let long = bytes(7, HERE, 64);
    for count in 0..64 {
        assert_eq!(bytes(7, HERE, count), long[..count]);
    }
}

#[test]
fn no_stretch_of_the_pattern_is_poison() {
    let words = bytes(3, HERE, 1 << 20);
    assert!(
        words
            .as_chunks::<8>()
            .0
            .iter()
            .all(|word| *word != [POISON; 8])
    );
}

#[test]
fn digests_depend_on_bytes_layers_and_order() {
    let digest = |layers: &[&[u8]]| {
        let mut digest = BlockDigest::new();
        for layer in layers {
            digest.layer(layer);
        }
        digest.finish()
    };
    assert_eq!(digest(&[b"ab", b"cd"]), digest(&[b"ab", b"cd"]));
    assert_ne!(digest(&[b"ab", b"cd"]), digest(&[b"cd", b"ab"]));
    assert_ne!(digest(&[b"ab", b"cd"]), digest(&[b"ab", b"ce"]));
    assert_ne!(request_digest(&[1, 2]), request_digest(&[2, 1]));
    assert_ne!(request_digest(&[1]), request_digest(&[1, 0]));
}
