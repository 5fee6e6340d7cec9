use super::*;

#[test]
fn memory_kinds_have_names() {
    assert_eq!(MemoryKind::Host.to_string(), "host");
    assert_eq!(MemoryKind::Cuda { device: 3 }.to_string(), "cuda:3");
}
