use super::*;

#[test]
fn a_request_survives_the_way() {
    for request in [
        DemoRequest::Begin { in_flight: 4 },
        DemoRequest::Next { ticket: 1 },
        DemoRequest::Finish,
    ] {
        assert_eq!(DemoRequest::decode(&request.encode().unwrap()), Ok(request));
    }
}
