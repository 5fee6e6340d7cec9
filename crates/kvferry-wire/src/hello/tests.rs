use super::*;

#[test]
fn codes_print_in_words() {
    assert_eq!(
        HelloRejectCode::WrongIncarnation.to_string(),
        "wrong incarnation"
    );
    assert_eq!(HelloRejectCode::Version.to_string(), "version");
    assert_eq!(HelloRejectCode::Incompatible.to_string(), "incompatible");
    assert_eq!(HelloRejectCode::ShuttingDown.to_string(), "shutting down");
}

/// Whoever reads a greeting of another version must be able to read that it is one.
#[test]
fn the_version_comes_first() {
    let reply = HelloReply::Rejected {
        connection: 9,
        code: HelloRejectCode::Version,
        reason: String::new(),
    };
    assert_eq!(
        reply.encode().unwrap().first_chunk(),
        Some(&HELLO_VERSION.to_le_bytes())
    );
}
