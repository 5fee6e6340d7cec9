use super::*;

#[test]
fn an_answer_survives_the_way() {
    let reply = HelloReply::Rejected {
        code: HelloRejectCode::Version,
        reason: "version 2".to_owned(),
    };
    assert_eq!(HelloReply::decode(&reply.encode().unwrap()), Ok(reply));
}
