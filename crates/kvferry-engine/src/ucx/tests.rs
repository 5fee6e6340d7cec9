use super::*;
#[test]
fn explore() {
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).init();
    for tls in [c"", c"tcp", c"posix,sysv,cma,tcp", c"cma", c"posix,cma,self", c"all", c"self", c"posix,self", c"self,tcp", c"posix,tcp"] {
        let t = std::time::Instant::now();
        let settings = [(c"TLS", tls)];
        let r = UcxFabric::with_settings(true, if tls.is_empty() {&[]} else {&settings});
        println!("=== {tls:?} {:?}", t.elapsed());
        match r {
            Ok(mut f) => {
                println!("ok {f:?}");
                let a = f.addresses();
                println!("addr {} {:?}", a.message.len(), a.data.as_ref().map(|d| d.len()));
                f.connect(EndpointId(1), &a).unwrap();
                println!("{}", f.transports(EndpointId(1)));
                let h = f.endpoints[&EndpointId(1)].message.handle();
                println!("{}", unsafe { super::worker::owned(ucx_sys::kvf_ep_text(h)) });
                let h = f.endpoints[&EndpointId(1)].data.as_ref().unwrap().handle();
                println!("DATA {}", unsafe { super::worker::owned(ucx_sys::kvf_ep_text(h)) });
            }
            Err(e) => println!("ERR {e}"),
        }
    }
}
