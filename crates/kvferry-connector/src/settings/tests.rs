use std::collections::HashMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::reading::{Key, Kind, variable};
use super::*;
use crate::storage::StorageConfig;

fn read(config: &Value) -> Result<Settings, SettingsError> {
    Settings::from_json(config.as_object().unwrap(), |_| None)
}

fn read_storage(config: &Value) -> Result<StorageOnly, SettingsError> {
    StorageOnly::from_json(config.as_object().unwrap(), |_| None)
}

fn error(config: Value) -> String {
    read(&config).unwrap_err().to_string()
}

fn id() -> EngineId {
    EngineId::new("e").unwrap()
}

/// The parts, as these settings make them, take them.
fn is_taken(settings: &Settings) {
    let remote = settings.remote(id(), Role::Both, 1, vec![16]);
    remote.validate().unwrap();
    settings.engine(id()).validate().unwrap();
    if let Some(storage) = settings.storage() {
        storage_is_taken(storage);
    }
}

fn storage_is_taken(settings: StorageSettings) {
    StorageConfig {
        settings,
        model: "m".to_owned(),
        layout: "l".to_owned(),
        block_tokens: vec![16],
        reach: Vec::new(),
        role: Role::Both,
        world: 1,
        one_pool: true,
    }
    .validate()
    .unwrap();
}

#[test]
fn without_a_key_everything_is_at_its_parts_default() {
    let settings = read(&json!({})).unwrap();
    assert_eq!(settings, Settings::default());
    let remote = settings.remote(id(), Role::Both, 1, vec![16]);
    assert_eq!(remote, RemoteConfig::new(id(), vec![16]));
    let (ours, default) = (settings.engine(id()), EngineConfig::new(id()));
    assert_eq!(format!("{ours:?}"), format!("{default:?}"));
    assert_eq!(settings.storage(), None);
    let only = read_storage(&json!({"shared_storage_path": "/kv"})).unwrap();
    assert_eq!(only.storage, StorageSettings::at("/kv"));
    let nulls: Params = Settings::describe()
        .map(|(key, ..)| (key.to_owned(), Value::Null))
        .collect();
    assert_eq!(read(&nulls.into()).unwrap(), Settings::default());
}

#[test]
fn every_key_goes_where_it_belongs() {
    let settings = read(&json!({
        "lease_duration": 1.5, "lease_max": 20, "side_channel_host": "::1", "side_channel_port": 7000,
        "advertise_host": "node-1", "lane": "served", "require_rdma": true, "devices": "mlx5_0:1",
        "transports": "rc,tcp", "workers": 3, "recompute_threshold_tokens": 100, "max_concurrent_loads": 5,
        "read_timeout": 4, "verify": "true", "connect_timeout": 3, "confirm_timeout": 0.25, "shutdown_timeout": 0,
        "shared_storage_path": "/kv", "shared_storage_max_bytes": 1000, "ucx": "libucx",
    }))
    .unwrap();
    assert_eq!(settings.shutdown_timeout, Duration::ZERO);
    assert_eq!(settings.ucx, Some(UcxChoice::Libucx));
    assert_eq!(
        settings.storage(),
        Some(StorageSettings {
            max_bytes: 1_000,
            ..StorageSettings::at("/kv")
        })
    );
    let seconds = Duration::from_secs;
    let expected = RemoteConfig {
        role: Role::Consumer,
        ranks: 2,
        listen_host: "::1".to_owned(),
        listen_port: 7_000,
        advertise_host: Some("node-1".to_owned()),
        lease: LeaseConfig {
            duration: Duration::from_millis(1_500),
            lease_max: seconds(20),
            ..LeaseConfig::default()
        },
        borrow: BorrowConfig {
            confirm_timeout: Duration::from_millis(250),
            lease_max: seconds(20),
            ..BorrowConfig::default()
        },
        recompute_threshold_tokens: 100,
        max_concurrent_loads: 5,
        read_timeout: seconds(4),
        verify: true,
        connect_timeout: seconds(3),
        lane: "served".parse().unwrap(),
        ..RemoteConfig::new(id(), vec![32, 16])
    };
    assert_eq!(
        settings.remote(id(), Role::Consumer, 2, vec![32, 16]),
        expected
    );
    let engine = settings.engine(id());
    assert_eq!((engine.copy_threads, engine.require_rdma), (3, true));
    assert_eq!(engine.net_devices.as_deref(), Some("mlx5_0:1"));
    assert_eq!(engine.transports.as_deref(), Some("rc,tcp"));

    let only = read_storage(&json!({
        "shared_storage_path": "/kv", "shared_storage_max_bytes": 5, "shared_storage_io_threads": 6,
        "shared_storage_max_pending_saves": 7, "shared_storage_lookup_timeout": 0.0084,
        "shared_storage_io_timeout": 9,
    }));
    let expected = StorageSettings {
        path: "/kv".into(),
        max_bytes: 5,
        io_threads: 6,
        max_pending_saves: 7,
        lookup_timeout_ms: 8,
        io_timeout_ms: 9_000,
    };
    assert_eq!(only.unwrap().storage, expected);
}

#[test]
fn numbers_and_switches_may_be_texts_and_the_environment_overrides() {
    let config = json!({"lease_duration": "30", "workers": " 4 ", "require_rdma": "True",
        "side_channel_port": "7000", "max_concurrent_loads": 8.0, "read_timeout": "1e1"});
    let settings = read(&config).unwrap();
    assert_eq!(settings.lease_duration, Duration::from_secs(30));
    assert_eq!((settings.workers, settings.require_rdma), (4, true));
    assert_eq!(settings.side_channel_port, 7_000);
    assert_eq!(
        (
            settings.max_concurrent_loads,
            settings.read_timeout.as_secs()
        ),
        (8, 10)
    );

    let variables = HashMap::from([
        ("KVFERRY_SIDE_CHANNEL_PORT", "9"),
        ("KVFERRY_LANE", "attached"),
        ("KVFERRY_REQUIRE_RDMA", "1"),
        ("KVFERRY_SHARED_STORAGE_PATH", ""),
        ("KVFERRY_SHARED_STORAGE_MAX_BYTES", "5"),
        ("KVFERRY_UCX", "/opt/ucx/lib/libucp.so.0"),
    ]);
    let env = |name: &str| variables.get(name).map(|&text| text.to_owned());
    // Also over a value that is wrong.
    let config = json!({"side_channel_port": 7, "lane": "none such"});
    let settings = Settings::from_json(config.as_object().unwrap(), env).unwrap();
    assert_eq!(
        (settings.side_channel_port, settings.lane),
        (9, "attached".parse().unwrap())
    );
    assert!(settings.require_rdma && settings.shared_storage.is_none());
    let path = PathBuf::from("/opt/ucx/lib/libucp.so.0");
    assert_eq!(settings.ucx, Some(UcxChoice::Path(path)));
}

#[test]
fn what_is_wrong_is_named_with_key_value_range_and_origin() {
    assert_eq!(
        error(json!({"side_channel_prot": null})),
        "KvferryConnector: the unknown key \"side_channel_prot\" in kv_connector_extra_config; did you mean \
         \"side_channel_port\"?"
    );
    assert_eq!(
        error(json!({"num_threads": 4})),
        "KvferryConnector: the unknown key \"num_threads\" in kv_connector_extra_config; it is one of NixlConnector, \
         and workers serves in its place"
    );
    let text = error(json!({"foo": 1}));
    assert!(
        text.contains("; there are lease_duration, lease_max, "),
        "{text}"
    );
    assert_eq!(
        error(json!({"shared_storage_io_threads": 3})),
        "KvferryConnector: the key \"shared_storage_io_threads\" in kv_connector_extra_config is one of \
         KvferryStorageConnector; move it to there, or remove it"
    );
    assert_eq!(
        read_storage(&json!({"lane": "auto"}))
            .unwrap_err()
            .to_string(),
        "KvferryStorageConnector: the key \"lane\" in kv_connector_extra_config is one of KvferryConnector; \
         move it to there, or remove it"
    );
    assert_eq!(
        error(json!({"workers": 65})),
        "KvferryConnector: `workers`, from kv_connector_extra_config, is 65, expected a whole number, 1 to 64"
    );
    let env = |name: &str| (name == "KVFERRY_READ_TIMEOUT").then(|| "0".to_owned());
    assert_eq!(
        Settings::from_json(&Params::new(), env)
            .unwrap_err()
            .to_string(),
        "KvferryConnector: `read_timeout`, from the environment variable KVFERRY_READ_TIMEOUT, is \"0\", \
         expected seconds, 0.001 to 604800"
    );
    assert_eq!(
        read_storage(&json!({})).unwrap_err().to_string(),
        "KvferryStorageConnector: `shared_storage_path` is needed; set it in kv_connector_extra_config or in \
         the environment"
    );
    assert_eq!(
        error(json!({"shared_storage_max_bytes": 5})),
        "KvferryConnector: `shared_storage_max_bytes` is set without `shared_storage_path`; set that too, or \
         remove it"
    );
    assert_eq!(
        error(json!({"lease_duration": 700})),
        "KvferryConnector: `lease_duration` is 700s, more than `lease_max`, 600s; lower it or raise `lease_max`"
    );
    assert!(
        error(json!({"transports": "tpc"})).contains("expected names of UCX transports or groups")
    );
    assert!(
        error(json!({"devices": "^eth0"})).contains("expected all, or names of network devices")
    );
    let long = error(json!({"lane": "x".repeat(10_000)}));
    assert!(
        long.len() < 400 && long.contains("xxx..., expected auto, native"),
        "{long}"
    );
    for wrong in [
        json!({"lane": 3}),
        json!({"require_rdma": 1}),
        json!({"require_rdma": "yes"}),
        json!({"workers": 1.5}),
        json!({"workers": -1}),
        json!({"workers": "two"}),
        json!({"workers": true}),
        json!({"lease_duration": "NaN"}),
        json!({"lease_duration": "inf"}),
        json!({"lease_duration": [30]}),
        json!({"side_channel_host": ""}),
        json!({"lane": "mapped"}),
        json!({"advertise_host": "a b"}),
        json!({"advertise_host": "abc!"}),
        json!({"shared_storage_path": "kv"}),
        json!({"ucx": "1.22"}),
        json!({"shared_storage_path": ""}),
        json!({"side_channel_port": 65_536}),
    ] {
        let (key, _) = wrong.as_object().unwrap().iter().next().unwrap();
        let text = error(wrong.clone());
        assert!(
            text.contains(&format!("`{key}`")) && text.contains("expected"),
            "{text}"
        );
    }
}

#[test]
fn what_is_set_is_shown_with_its_origin() {
    let env = |name: &str| (name == "KVFERRY_LANE").then(|| "served".to_owned());
    let config = json!({"lane": "auto", "lease_duration": "5", "devices": null});
    let chosen = Settings::chosen(config.as_object().unwrap(), env);
    assert_eq!(
        chosen,
        ["lease_duration=\"5\"", "lane=\"served\" (KVFERRY_LANE)"]
    );
    assert_eq!(
        StorageOnly::chosen(&Params::new(), env),
        Vec::<String>::new()
    );
}

#[test]
fn what_is_said_of_a_default_is_the_default() {
    for key in KVFERRY.iter().chain(STORAGE) {
        let mut draft = Draft::default();
        if key.default != "none" {
            key.kind.put(&mut draft, &json!(key.default)).unwrap();
        }
        assert_eq!(draft, Draft::default(), "{}", key.name);
    }
    let rows: Vec<_> = Settings::describe().collect();
    assert_eq!(rows.len(), KVFERRY.len());
    let help = "Threads of a rank that copy blocks of peers on this host (a whole number, 1 to 64)";
    assert!(rows.contains(&("workers", "2", help.to_owned())));
}

#[test]
fn the_page_on_storage_lists_its_keys() {
    let page = include_str!("../../../../docs/storage.md");
    let written = page
        .lines()
        .filter(|line| line.starts_with("| `shared_storage_"));
    let rows = StorageOnly::describe()
        .map(|(key, default, help)| format!("| `{key}` | {default} | {help} |"));
    assert_eq!(rows.collect::<Vec<_>>(), written.collect::<Vec<_>>());
}

/// The bounds of the table are those of the parts: what is at a bound is taken by them, and what the table
/// refuses beyond it, they refuse too.
#[test]
fn the_ranges_are_those_of_the_parts() {
    for key in KVFERRY.iter().chain(STORAGE) {
        let bounds = match &key.kind {
            Kind::Seconds(range, _) => vec![json!(range.start()), json!(range.end())],
            Kind::Number(range, _) => vec![json!(range.start()), json!(range.end())],
            Kind::Switch(_) | Kind::Text(..) => continue,
        };
        for bound in bounds {
            let mut config = json!({"lease_duration": 0.001, "lease_max": 604_800, "shared_storage_path": "/kv"});
            config[key.name] = bound.clone();
            if KVFERRY.iter().any(|it| it.name == key.name) {
                is_taken(&read(&config).unwrap());
            } else {
                let config = json!({"shared_storage_path": "/kv", key.name: bound});
                storage_is_taken(read_storage(&config).unwrap().storage);
            }
        }
    }
    let with = |change: fn(&mut Settings)| {
        let mut settings = Settings::default();
        change(&mut settings);
        let remote = settings.remote(id(), Role::Both, 1, vec![16]).validate();
        remote.is_ok() && settings.engine(id()).validate().is_ok()
    };
    assert!(with(|_| ()));
    assert!(!with(|it| it.workers = 65) && !with(|it| it.workers = 0));
    assert!(!with(|it| it.max_concurrent_loads = 0));
    assert!(!with(|it| it.read_timeout = Duration::from_secs(604_801)));
    assert!(!with(|it| it.connect_timeout = Duration::from_micros(999)));
    assert!(!with(|it| it.lease_max = Duration::from_secs(604_801)));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0..1_000_000_u64).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        "-?[0-9.e]{1,8}".prop_map(Value::from),
        prop::sample::select(vec![
            "auto", "true", "tcp", "NaN", "inf", "/x", "^", "\u{0}"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(".{0,6}", inner, 0..4)
                .prop_map(|map| Value::from(map.into_iter().collect::<Params>())),
        ]
    })
}

fn any_key() -> impl Strategy<Value = String> {
    let names: Vec<String> = KVFERRY
        .iter()
        .chain(STORAGE)
        .map(|it| it.name.to_owned())
        .collect();
    prop_oneof![8 => prop::sample::select(names), 1 => ".{0,30}"]
}

/// A value that a key takes, as a user may write it, and as a text.
fn valid(key: &'static Key<Draft>) -> BoxedStrategy<(Value, String)> {
    match &key.kind {
        Kind::Seconds(range, _) => {
            let millis = (range.start() * 1e3) as u64..=(range.end() * 1e3) as u64;
            millis
                .prop_map(|millis| {
                    let seconds = millis as f64 / 1e3;
                    (json!(seconds), seconds.to_string())
                })
                .boxed()
        }
        Kind::Number(range, _) => range
            .clone()
            .prop_map(|number| (json!(number), number.to_string()))
            .boxed(),
        Kind::Switch(_) => any::<bool>()
            .prop_map(|on| (json!(on), on.to_string()))
            .boxed(),
        Kind::Text(..) => {
            let texts: Vec<&str> = match key.name {
                "lane" => vec!["auto", "native", "attached", "served"],
                "transports" => vec!["all", "tcp", "rc,tcp", "^sm"],
                "devices" => vec!["all", "eth0", "mlx5_0:1,mlx5_1:1"],
                "ucx" => vec!["system", "libucx", "./libucp.so"],
                "shared_storage_path" => vec!["/", "/mnt/kv"],
                _ => vec![
                    "localhost",
                    "10.0.0.7",
                    "[fe80::1%eth0]",
                    "decode-1.example",
                ],
            };
            prop::sample::select(texts)
                .prop_map(|text| (json!(text), text.to_owned()))
                .boxed()
        }
    }
}

fn some_key() -> impl Strategy<Value = (&'static Key<Draft>, Value, String)> {
    let keys: Vec<&'static Key<Draft>> = KVFERRY.iter().chain(&STORAGE[2..]).collect();
    prop::sample::select(keys)
        .prop_flat_map(|key| valid(key).prop_map(move |(value, text)| (key, value, text)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn whatever_is_configured_is_taken_by_the_parts_or_refused(
        extra in prop::collection::hash_map(any_key(), any_json(), 0..3),
        name in any_key(),
        text in "\\PC{0,12}",
    ) {
        let extra: Params = extra.into_iter().collect();
        let variable = variable(&name);
        let env = |asked: &str| (asked == variable).then(|| text.clone());
        if let Ok(settings) = Settings::from_json(&extra, env) {
            is_taken(&settings);
        }
        if let Ok(only) = StorageOnly::from_json(&extra, env) {
            storage_is_taken(only.storage);
        }
    }

    /// As a number, as a text, and in the environment over something else, a value is read as the same, and it
    /// is the one that was written.
    #[test]
    fn a_value_comes_through_however_it_is_written((key, value, text) in some_key()) {
        let mut expected = Draft::default();
        key.kind.put(&mut expected, &value).unwrap();
        let of = |config: Value, env: Option<&str>| {
            let env = |name: &str| env.filter(|_| name == variable(key.name)).map(str::to_owned);
            let keys: &'static [Key<Draft>] =
                if KVFERRY.iter().any(|it| it.name == key.name) { KVFERRY } else { STORAGE };
            reading::read(CONNECTOR, keys, &[], config.as_object().unwrap(), &env).unwrap()
        };
        prop_assert_eq!(&of(json!({key.name: value}), None), &expected);
        prop_assert_eq!(&of(json!({key.name: &text}), None), &expected);
        prop_assert_eq!(&of(json!({key.name: [1]}), Some(&text)), &expected);
    }

    #[test]
    fn an_unknown_key_is_always_refused(key in "[a-z_A-Z. ]{0,30}", value in any_json()) {
        prop_assume!(!KVFERRY.iter().chain(STORAGE).any(|it| it.name == key));
        let config = json!({key.clone(): value, "shared_storage_path": "/kv"});
        for (error, keys) in [
            (read(&config).unwrap_err(), KVFERRY),
            (read_storage(&config).unwrap_err(), STORAGE),
        ] {
            let SettingsError::UnknownKey { key: named, suggestion, .. } = error else {
                panic!("{error}");
            };
            prop_assert_eq!(&named, &key);
            prop_assert!(keys.iter().any(|it| suggestion.contains(it.name)), "{}", suggestion);
        }
    }
}
