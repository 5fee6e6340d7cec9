use super::*;

#[test]
fn a_request_survives_the_way() {
    for ranks in [None, Some(vec![]), Some(vec![Rank { pp: 1, tp: 2 }])] {
        let request = DirectoryRequest { ranks };
        let frame = request.encode_frame().unwrap();
        let (header, body) = frame.split_first_chunk().unwrap();
        assert_eq!(
            FrameHeader::parse(header, MAX_DIRECTORY_REQUEST_BYTES),
            Ok(body.len())
        );
        assert_eq!(DirectoryRequest::decode_body(body), Ok(request));
    }
}
