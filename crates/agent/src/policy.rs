//! The policy file: what an operator wants of the services of a host.

use std::collections::BTreeMap;
use std::time::Duration;

use bytesize::ByteSize;
use polder_linux::{CGROUPS, Cgroup};
use polder_place::pages::{LocalBounds, ServicePolicy, TierRule};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::Name;

/// Why a policy file is refused: one line that names the line, the key, the value and what was expected.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PolicyError(String);

/// How the tasks of a service are found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// By their cgroup.
    Cgroup(Cgroup),
    /// By their unit of systemd, such as `web.service`.
    Unit(String),
    /// By labels of their pods in Kubernetes. Each pod is a service of its own, `NAME/POD`.
    Pods(Selector),
}

/// Labels that a pod has, and its namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector {
    /// Keys and values; a pod has all of them.
    pub labels: BTreeMap<String, String>,
    /// Its namespace; any where it is left out.
    pub namespace: Option<String>,
}

impl Selector {
    /// Reads labels such as `app=web,tier=front`.
    fn parse(text: &str, namespace: Option<String>) -> Option<Self> {
        const LONGEST: usize = 317;
        let is_plain = |text: &str| {
            text.len() <= LONGEST && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
        };
        let label = |label: &str| {
            let (key, value) = label.split_once('=')?;
            let (key, value) = (key.trim(), value.trim_start_matches('=').trim());
            (!key.is_empty() && is_plain(key) && is_plain(value)).then(|| (key.to_owned(), value.to_owned()))
        };
        let pairs = text.split(',').map(label).collect::<Option<Vec<_>>>()?;
        let labels: BTreeMap<_, _> = pairs.iter().cloned().collect();
        // No pod has two values of a key.
        (labels.len() == pairs.len()).then_some(Self { labels, namespace })
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let labels: Vec<String> = self.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        write!(to, "{}", labels.join(","))?;
        self.namespace.as_ref().map_or(Ok(()), |namespace| write!(to, " in {namespace}"))
    }
}

/// Where the pods of this node are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kubernetes {
    /// An address of this host, or a file.
    pub pods: String,
    /// The kubelet's root cgroup.
    pub cgroup_root: String,
}

impl Place {
    /// As the policy file has it.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Cgroup(cgroup) => cgroup.path().to_owned(),
            Self::Unit(unit) => unit.clone(),
            Self::Pods(selector) => selector.to_string(),
        }
    }
}

/// Lines of the policy file, from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lines {
    /// Of the service's head.
    pub service: usize,
    /// Of `tier`.
    pub tier: usize,
    /// Of `local_low`, if it is there.
    pub local_low: Option<usize>,
    /// Of `local_high`, if it is there.
    pub local_high: Option<usize>,
    /// Of `page_cache`, if it is there.
    pub page_cache: Option<usize>,
}

/// One service of a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// The operator's name for it.
    pub name: Name,
    /// How its tasks are found.
    pub place: Place,
    /// What is wanted of it.
    pub policy: ServicePolicy,
    /// Where the file says so.
    pub lines: Lines,
    /// Whether it is a unit that the policy does not name.
    pub is_default: bool,
}

/// Weights of the nodes for memory that programs interleave by weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// By the bandwidths of HMAT.
    Auto,
    /// As given, by node.
    Given(BTreeMap<u32, u8>),
}

/// What an operator wants of a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Time from one control round to the next.
    pub period: Duration,
    /// Bytes that are demoted in one round at most; [`None`] where they follow from the machine and from what services have too much.
    pub step_bytes: Option<u64>,
    /// A service that waits for memory for more than this percentage of ten seconds is left alone.
    pub pressure_limit: f64,
    /// A service that reads more pages a second again than this is left alone.
    pub refault_limit: u64,
    /// Proactive demotion begins when less than this share of the fast tier is free; 0 for never.
    pub free_low: f64,
    /// It ends when this share is free.
    pub free_high: f64,
    /// Bytes a second that promotion may take, to all fast nodes together.
    pub promotion_limit: Option<u64>,
    /// Weights of the nodes.
    pub weights: Option<Weights>,
    /// What holds the shares of services.
    pub fair_share: FairShare,
    /// What is done about bad CXL memory.
    pub health: Option<HealthPolicy>,
    /// Where pods are found, if services are named by their labels.
    pub kubernetes: Option<Kubernetes>,
    /// Services in the order of their names.
    pub services: Vec<Service>,
    /// What is wanted of each unit of the system that no service names, and where the file says so.
    pub default: Option<(ServicePolicy, Lines)>,
    /// What the file says and hardly means.
    pub warnings: Vec<String>,
}

/// What is done about bad CXL memory, and which line says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthPolicy {
    /// What is done.
    pub bad_memory: BadMemory,
    /// The line.
    pub line: usize,
}

/// What is done about services that have pages on bad CXL memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BadMemory {
    /// They are named.
    Alarm,
    /// They are kept off the slow tier too, while the memory is bad.
    OptOut,
    /// All services of the policy are kept off the slow tier.
    Drain,
}

/// What holds the shares of services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FairShare {
    /// The agent, by reclaim.
    #[default]
    Agent,
    /// The kernel, by goals of DAMON, from Linux 6.19 on; the agent where it has none.
    Kernel,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    period: Option<Spanned<String>>,
    step: Option<Spanned<String>>,
    pressure_limit: Option<Spanned<f64>>,
    refault_limit: Option<Spanned<u64>>,
    free_low: Option<Spanned<f64>>,
    free_high: Option<Spanned<f64>>,
    promotion_limit: Option<Spanned<String>>,
    interleave: Option<Spanned<toml::Value>>,
    #[serde(default)]
    fair_share: FairShare,
    health: Option<FileHealth>,
    kubernetes: Option<FileKubernetes>,
    default: Option<Spanned<String>>,
    #[serde(default)]
    profile: BTreeMap<String, FileRules>,
    #[serde(default)]
    service: BTreeMap<String, Spanned<FileService>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileHealth {
    bad_memory: Spanned<BadMemory>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileKubernetes {
    pods: Spanned<String>,
    cgroup_root: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileService {
    cgroup: Option<Spanned<String>>,
    unit: Option<Spanned<String>>,
    label: Option<Spanned<String>>,
    namespace: Option<Spanned<String>>,
    profile: Option<Spanned<String>>,
    tier: Option<Spanned<TierRule>>,
    local_low: Option<Spanned<f64>>,
    local_high: Option<Spanned<f64>>,
    page_cache: Option<Spanned<FileCache>>,
}

/// What is wanted of services of one kind.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileRules {
    tier: Option<Spanned<TierRule>>,
    local_low: Option<Spanned<f64>>,
    local_high: Option<Spanned<f64>>,
    page_cache: Option<Spanned<FileCache>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FileCache {
    Any,
    Slow,
}

/// A shorter one would leave no time to anything else.
const SHORTEST_PERIOD: Duration = Duration::from_millis(1);
/// In a longer one pages that break an opt-out would lie there, and nobody would see that the agent does nothing.
const LONGEST_PERIOD: Duration = Duration::from_secs(3600);
/// The kernel moves whole pages.
const SMALLEST_STEP: u64 = 4 << 10;
const LARGEST_SIZE: u64 = 1 << 50;
/// The kernel knows whole MiB a second, up to the largest int.
const LOWEST_RATE: u64 = 1_000_000;
const HIGHEST_RATE: u64 = (i32::MAX as u64) << 20;

/// The text of a file, by which an offset becomes a line.
struct Text<'t>(&'t str);

impl Text<'_> {
    fn line(&self, offset: usize) -> usize {
        self.0.as_bytes()[..offset.min(self.0.len())].iter().filter(|byte| **byte == b'\n').count() + 1
    }

    fn line_of<T>(&self, value: &Spanned<T>) -> usize {
        self.line(value.span().start)
    }

    /// That the value of `key` is not what it must be.
    fn wrong<T: std::fmt::Debug>(&self, key: &str, value: &Spanned<T>, expected: &str) -> PolicyError {
        let line = self.line_of(value);
        PolicyError(format!("line {line}: {key} = {:?} is not {expected}", value.get_ref()))
    }

    /// The value, or `usual` where the key is left out; refused where `checked` has none.
    fn value<T: std::fmt::Debug, V>(
        &self,
        key: &str,
        value: Option<&Spanned<T>>,
        usual: V,
        checked: impl FnOnce(&T) -> Option<V>,
    ) -> Result<V, PolicyError> {
        match value {
            Some(value) => checked(value.get_ref()).ok_or_else(|| self.wrong(key, value, wanted(key))),
            None => Ok(usual),
        }
    }

    fn share(&self, key: &str, value: Option<&Spanned<f64>>, usual: f64) -> Result<f64, PolicyError> {
        self.value(key, value, usual, |share| Some(*share).filter(|share| (0.0..=1.0).contains(share)))
    }

    /// A warning, if the value is a path with what a shell takes as a pattern.
    fn has_pattern(&self, key: &str, path: &Spanned<String>) -> Option<String> {
        let line = self.line_of(path);
        let path = path.get_ref().as_str();
        path.contains(['*', '?', '[']).then(|| {
            format!(
                "line {line}: {key} = {path:?} names one cgroup, and is no pattern; write `default` and a profile for all that have no service"
            )
        })
    }

    /// A warning, if the value is a path that has the mount of the cgroups in front.
    fn has_mount(&self, key: &str, path: &Spanned<String>) -> Option<String> {
        let below = path.get_ref().strip_prefix(CGROUPS).filter(|below| below.starts_with('/'))?;
        let (line, path) = (self.line_of(path), path.get_ref());
        Some(format!(
            "line {line}: {key} = {path:?} names {CGROUPS}{path}, because it is a path below {CGROUPS}; write {below:?}"
        ))
    }
}

/// What the value of a key is.
fn wanted(key: &str) -> &'static str {
    match key.rsplit('.').next().unwrap_or(key) {
        "period" => "a time from 1ms to 1h, such as \"2s\"",
        "step" => "a size such as \"32MiB\", of a page (4KiB) at least and 1PiB at most",
        "pressure_limit" => "a percentage above 0, such as 10.0",
        "refault_limit" => "pages a second, such as 1000",
        "free_low" | "free_high" | "local_low" | "local_high" => "a share from 0 to 1, such as 0.5",
        "promotion_limit" => "a rate such as \"200MB/s\", from 1MB/s to 1PB/s",
        "cgroup" => "a cgroup's path below the mount, such as \"/system.slice/web.service\"",
        "unit" => "one unit such as \"web.service\"; a profile and `default` are for many",
        "label" => "labels such as \"app=web\", with a comma between two of different keys",
        "namespace" => "a namespace such as \"shop\"",
        "tier" => "\"opt-in\", \"opt-out\" or \"background\"",
        "page_cache" => "\"any\" or \"slow\"",
        "profile" | "default" => "the name of a profile, such as \"batch\" for [profile.batch]",
        "fair_share" => "\"agent\" or \"kernel\"",
        "bad_memory" => "\"alarm\", \"opt-out\" or \"drain\"",
        "pods" => "an address of this host such as \"http://127.0.0.1:10255/pods\", or a file",
        "cgroup_root" => "a path such as \"/kubelet\"",
        // `service`, a service by its name, and the others that have a head.
        _ => "a table, such as [health] or [service.web]",
    }
}

impl Policy {
    /// Reads the text of a policy file.
    ///
    /// ```
    /// let policy = polder_agent::Policy::parse(
    ///     "[service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\nlocal_low = 0.6\nlocal_high = 0.8\n",
    /// ).unwrap();
    /// assert_eq!(policy.services[0].name, "cache");
    /// assert_eq!(policy.services[0].lines.local_low, Some(4));
    /// ```
    ///
    /// # Errors
    /// [`PolicyError`] with the line, the key at fault, and what was expected.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let at = Text(text);
        let file = parse_file(text)?;
        let period = |text: &String| {
            let period = humantime::parse_duration(text).ok();
            period.filter(|period| (SHORTEST_PERIOD..=LONGEST_PERIOD).contains(period))
        };
        // "Mb" is a megabit to some, and a size that no machine has is no size.
        let bytes = |text: &String| {
            let size = text.parse::<ByteSize>().ok().filter(|_| !text.ends_with('b'))?.as_u64();
            Some(size).filter(|bytes| *bytes <= LARGEST_SIZE)
        };
        let percent = |percent: &f64| Some(*percent).filter(|percent| *percent > 0.0 && *percent <= 100.0);
        let rate = |text: &String| {
            bytes(&text.strip_suffix("/s")?.to_owned())
                .filter(|rate| LOWEST_RATE <= *rate && *rate <= HIGHEST_RATE)
        };
        let free_low = at.share("free_low", file.free_low.as_ref(), 0.0)?;
        let free_high = at.share("free_high", file.free_high.as_ref(), free_low)?;
        if let Some(value) = file.free_high.as_ref().filter(|_| free_high < free_low) {
            return Err(at.wrong("free_high", value, &format!("at least free_low ({free_low})")));
        }
        if let Some(value) = file.free_high.as_ref().filter(|_| file.free_low.is_none()) {
            return Err(at.wrong("free_high", value, "of use without free_low, below which demotion begins"));
        }
        let promotion_limit = file.promotion_limit.as_ref();
        let roots = file.kubernetes.iter().filter_map(|it| it.cgroup_root.as_ref());
        let roots = roots.map(|root| ("kubernetes.cgroup_root".to_owned(), root));
        let cgroups = file.service.iter().filter_map(|(name, service)| {
            Some((format!("service.{name}.cgroup"), service.get_ref().cgroup.as_ref()?))
        });
        let paths = roots.chain(cgroups);
        let mut warnings: Vec<String> = paths
            .flat_map(|(key, path)| [at.has_mount(&key, path), at.has_pattern(&key, path)])
            .flatten()
            .collect();
        if file.service.is_empty() && file.default.is_none() {
            let what = "without a service no memory is moved; `polder agent example FOLDER` writes a policy to begin with";
            warnings.push(what.to_owned());
        }
        let profiles = file.profile;
        for (name, rules) in &profiles {
            rules_of(&at, &format!("profile.{name}"), None, rules)?;
        }
        let default = file.default.as_ref().map(|name| {
            let rules = profile(&at, "default", name, &profiles)?;
            rules_of(&at, &format!("profile.{}", name.get_ref()), None, rules)
        });
        let services: Vec<Service> = file
            .service
            .into_iter()
            .map(|(name, service)| checked(&at, name, service, &profiles))
            .collect::<Result<_, _>>()?;
        let kubernetes = file.kubernetes.map(|it| kubernetes(&at, &it)).transpose()?;
        if let Some(service) =
            services.iter().find(|it| matches!(it.place, Place::Pods(_)) && kubernetes.is_none())
        {
            return Err(PolicyError(format!(
                "line {}: service.{}: label needs to know the pods; write pods = \"http://127.0.0.1:10255/pods\" or a file below [kubernetes]",
                service.lines.service, service.name
            )));
        }
        let mut owners = BTreeMap::new();
        for service in &services {
            if let Some(other) = owners.insert(&service.place, &service.name) {
                let (name, line, place) = (&service.name, service.lines.service, service.place.name());
                return Err(PolicyError(format!(
                    "line {line}: service.{name}: {place:?} is that of service.{other} too; name each once"
                )));
            }
        }
        Ok(Self {
            period: at.value("period", file.period.as_ref(), Duration::from_secs(2), period)?,
            step_bytes: at.value("step", file.step.as_ref(), None, |text| {
                bytes(text).filter(|bytes| *bytes >= SMALLEST_STEP).map(Some)
            })?,
            pressure_limit: at.value("pressure_limit", file.pressure_limit.as_ref(), 10.0, percent)?,
            refault_limit: file.refault_limit.as_ref().map_or(1000, |pages| *pages.get_ref()),
            free_low,
            free_high,
            promotion_limit: at
                .value("promotion_limit", promotion_limit, None, |text| rate(text).map(Some))?,
            fair_share: file.fair_share,
            health: file.health.map(|health| HealthPolicy {
                bad_memory: *health.bad_memory.get_ref(),
                line: at.line_of(&health.bad_memory),
            }),
            kubernetes,
            weights: file.interleave.as_ref().map(|value| weights(&at, value)).transpose()?,
            services,
            default: default.transpose()?,
            warnings,
        })
    }

    /// What is wanted of each service, those that no line names included.
    pub(crate) fn rules(&self) -> impl Iterator<Item = &ServicePolicy> {
        self.services
            .iter()
            .map(|service| &service.policy)
            .chain(self.default.iter().map(|(policy, _)| policy))
    }

    /// The service of this name; for a pod's, `NAME/POD`, the one that selects it.
    #[must_use]
    pub fn service(&self, name: &str) -> Option<&Service> {
        let find = |name: &str| {
            let found = self.services.binary_search_by(|service| (*service.name).cmp(name)).ok();
            found.map(|index| &self.services[index])
        };
        let is_by_label = |service: &&Service| matches!(service.place, Place::Pods(_));
        let of_pod = name.split_once('/').and_then(|(of, _)| find(of)).filter(is_by_label);
        of_pod.or_else(|| find(name).filter(|service| !is_by_label(service)))
    }

    /// Pages that a service may read again in one round.
    pub(crate) fn refaults_a_round(&self) -> u64 {
        (self.refault_limit as f64 * self.period.as_secs_f64()).ceil() as u64
    }
}

/// The file as its keys have it; a key of a wrong name or kind is named with its line.
fn parse_file(text: &str) -> Result<File, PolicyError> {
    let refused = |path: String, error: &toml::de::Error| {
        let line = error.span().map_or(1, |span| Text(text).line(span.start));
        let mut message = error.message().lines().collect::<Vec<_>>().join(", ");
        // What is wanted is said in words of the file, and not as a type of this program.
        match message.split_once(", expected ") {
            Some((found, _)) if found.starts_with("invalid ") => {
                message = format!("{found}, expected {}", wanted(&path));
            }
            None if message.starts_with("wanted ") => message = format!("expected {}", wanted(&path)),
            _ => {}
        }
        let key = if path.is_empty() { String::new() } else { format!("{path}: ") };
        PolicyError(format!("line {line}: {key}{message}"))
    };
    let file = toml::Deserializer::parse(text).map_err(|error| refused(String::new(), &error))?;
    serde_path_to_error::deserialize(file).map_err(|error| {
        let segments = error.path().iter().map(ToString::to_string);
        let path: Vec<String> = segments.filter(|segment| !segment.contains("spanned")).collect();
        let path = path.join(".");
        refused(if path == "." || path == "?" { String::new() } else { path }, error.inner())
    })
}

/// `[interleave]`: `weights = "auto"`, or a weight for each node.
fn weights(at: &Text<'_>, value: &Spanned<toml::Value>) -> Result<Weights, PolicyError> {
    let expected =
        "weights = \"auto\", or a table of weights from 1 to 255 by node, such as { 0 = 3, 1 = 1 }";
    let wrong = || PolicyError(format!("line {}: interleave: expected {expected}", at.line_of(value)));
    let table = value.get_ref().as_table().filter(|table| table.len() == 1).ok_or_else(wrong)?;
    let given = match table.get("weights").ok_or_else(wrong)? {
        toml::Value::String(text) if text == "auto" => return Ok(Weights::Auto),
        toml::Value::Table(given) if !given.is_empty() => given,
        _ => return Err(wrong()),
    };
    let weight = |(node, weight): (&String, &toml::Value)| {
        let weight =
            weight.as_integer().and_then(|weight| u8::try_from(weight).ok()).filter(|weight| *weight > 0)?;
        Some((node.parse().ok()?, weight))
    };
    let weights = given.iter().map(weight).collect::<Option<BTreeMap<_, _>>>().ok_or_else(wrong)?;
    // A node may be written in two ways, such as 0 and 00.
    if weights.len() < given.len() {
        return Err(wrong());
    }
    Ok(Weights::Given(weights))
}

/// `[kubernetes]`: an address of this host, because what is read there says which cgroups are touched.
fn kubernetes(at: &Text<'_>, file: &FileKubernetes) -> Result<Kubernetes, PolicyError> {
    let pods = file.pods.get_ref();
    let host = pods.strip_prefix("http://").and_then(|rest| rest.split(['/', '?', '#']).next());
    let is_here = host.is_some_and(|host| {
        let (name, port) = host.rsplit_once(':').unwrap_or((host, "80"));
        ["127.0.0.1", "[::1]", "localhost"].contains(&name) && port.parse::<u16>().is_ok()
    });
    if !is_here && !pods.starts_with('/') {
        return Err(at.wrong("kubernetes.pods", &file.pods, wanted("pods")));
    }
    let cgroup_root = match &file.cgroup_root {
        None => "/".to_owned(),
        Some(root) if root.get_ref() == "/" || Cgroup::new(root.get_ref()).is_some() => {
            root.get_ref().clone()
        }
        Some(root) => return Err(at.wrong("kubernetes.cgroup_root", root, wanted("cgroup_root"))),
    };
    Ok(Kubernetes { pods: pods.clone(), cgroup_root })
}

fn checked(
    at: &Text<'_>,
    name: String,
    file: Spanned<FileService>,
    profiles: &BTreeMap<String, FileRules>,
) -> Result<Service, PolicyError> {
    // The span of a table begins with its first key, or with its head.
    let head = at.line_of(&file);
    let file = file.into_inner();
    let key = |key: &str| format!("service.{name}.{key}");
    let lines = [file.cgroup.as_ref(), file.unit.as_ref(), file.label.as_ref(), file.profile.as_ref()]
        .into_iter()
        .flatten()
        .map(|it| at.line_of(it));
    let first_line = lines.chain(file.tier.as_ref().map(|it| at.line_of(it))).min().unwrap_or(head);
    let tier_line = file.tier.as_ref().map_or(first_line, |it| at.line_of(it));
    let refused = |text: String| PolicyError(format!("line {tier_line}: service.{name}: {text}"));
    if name.is_empty() || name.chars().any(char::is_control) {
        let problem = format!(
            "line {tier_line}: a service is named {name:?}; expected a name without control characters"
        );
        return Err(PolicyError(problem));
    }
    if let Some(namespace) = file.namespace.as_ref().filter(|_| file.label.is_none()) {
        return Err(at.wrong(&key("namespace"), namespace, "of use without label"));
    }
    if let Some(namespace) = file.namespace.as_ref().filter(|it| it.get_ref().trim().is_empty()) {
        return Err(at.wrong(&key("namespace"), namespace, wanted("namespace")));
    }
    let place = match (&file.cgroup, &file.unit, &file.label) {
        (Some(cgroup), None, None) => Place::Cgroup(
            Cgroup::new(cgroup.get_ref())
                .ok_or_else(|| at.wrong(&key("cgroup"), cgroup, wanted("cgroup")))?,
        ),
        (None, None, Some(label)) => {
            let namespace = file.namespace.as_ref().map(|it| it.get_ref().clone());
            let selector = Selector::parse(label.get_ref(), namespace);
            let wrong = || at.wrong(&key("label"), label, wanted("label"));
            // Pods are named behind it.
            if name.contains('/') {
                return Err(refused("the name of a service with a label has no \"/\"".to_owned()));
            }
            Place::Pods(selector.ok_or_else(wrong)?)
        }
        (None, Some(unit), None) => {
            let text = unit.get_ref();
            let is_unit = [".service", ".scope", ".slice"].iter().any(|end| text.ends_with(end))
                && text.chars().all(|c| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c))
                // A template is no unit that runs, but its instances are.
                && !text.contains("@.");
            match is_unit {
                true => Place::Unit(text.clone()),
                false => return Err(at.wrong(&key("unit"), unit, wanted("unit"))),
            }
        }
        _ => {
            let expected =
                "expected one of cgroup = \"/PATH\", unit = \"NAME.service\" or label = \"KEY=VALUE\"";
            return Err(refused(expected.to_owned()));
        }
    };
    let of = match &file.profile {
        Some(of) => Some(profile(at, &key("profile"), of, profiles)?.clone()),
        None => None,
    };
    // What the service says itself counts before its profile.
    let rules = FileRules {
        tier: file.tier.or_else(|| of.as_ref()?.tier.clone()),
        local_low: file.local_low.or_else(|| of.as_ref()?.local_low.clone()),
        local_high: file.local_high.or_else(|| of.as_ref()?.local_high.clone()),
        page_cache: file.page_cache.or_else(|| of.as_ref()?.page_cache.clone()),
    };
    let (policy, lines) = rules_of(at, &format!("service.{name}"), Some(first_line), &rules)?;
    Ok(Service { name: name.into(), place, policy, lines, is_default: false })
}

/// The profile that a key names.
fn profile<'p>(
    at: &Text<'_>,
    key: &str,
    name: &Spanned<String>,
    profiles: &'p BTreeMap<String, FileRules>,
) -> Result<&'p FileRules, PolicyError> {
    profiles.get(name.get_ref()).ok_or_else(|| {
        let names = profiles.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let known = if names.is_empty() { "it has none".to_owned() } else { format!("it has {names}") };
        at.wrong(key, name, &format!("a profile of this file; {known}"))
    })
}

/// What is wanted by the keys of `owner`, such as `service.web`, which begins at the line `first`.
fn rules_of(
    at: &Text<'_>,
    owner: &str,
    first: Option<usize>,
    rules: &FileRules,
) -> Result<(ServicePolicy, Lines), PolicyError> {
    let key = |key: &str| format!("{owner}.{key}");
    let (low_line, high_line, cache_line) = (
        rules.local_low.as_ref().map(|it| at.line_of(it)),
        rules.local_high.as_ref().map(|it| at.line_of(it)),
        rules.page_cache.as_ref().map(|it| at.line_of(it)),
    );
    let Some(tier) = &rules.tier else {
        let line = first.or(low_line).or(high_line).or(cache_line).unwrap_or(1);
        return Err(PolicyError(format!("line {line}: {owner}: missing field `tier`")));
    };
    let tier_line = at.line_of(tier);
    let refused = |text: &str| PolicyError(format!("line {tier_line}: {owner}: {text}"));
    let low = at.share(&key("local_low"), rules.local_low.as_ref(), 0.0)?;
    let high = at.share(&key("local_high"), rules.local_high.as_ref(), 1.0)?;
    if let Some(value) = rules.local_low.as_ref().or(rules.local_high.as_ref()).filter(|_| low > high) {
        return Err(at.wrong(&key("local_low"), value, &format!("at most local_high ({high})")));
    }
    let rule = *tier.get_ref();
    let is_bounded = low_line.is_some() || high_line.is_some();
    if is_bounded && rule != TierRule::OptIn {
        return Err(refused("local_low and local_high apply to tier = \"opt-in\" alone; leave them out"));
    }
    let slow_cache = rules.page_cache.as_ref().is_some_and(|cache| *cache.get_ref() == FileCache::Slow);
    if slow_cache && rule == TierRule::OptOut {
        return Err(refused("page_cache = \"slow\" contradicts tier = \"opt-out\"; leave one out"));
    }
    let local = is_bounded.then_some(LocalBounds { low, high });
    let lines = Lines {
        service: first.unwrap_or(tier_line),
        tier: tier_line,
        local_low: low_line,
        local_high: high_line,
        page_cache: cache_line,
    };
    Ok((ServicePolicy { rule, local, slow_cache }, lines))
}

/// Small weights in the proportion of the nodes' bandwidths, which are off by at most one part in fifty, or by what 32 steps leave.
pub(crate) fn weights_of(bandwidths: &BTreeMap<u32, u64>) -> BTreeMap<u32, u8> {
    /// As the kernel's own weights by auto.
    const LARGEST: u32 = 32;
    const MOST_OFF: f64 = 0.02;
    let most = bandwidths.values().copied().max().unwrap_or(1).max(1) as f64;
    let weights = |largest: u32| {
        let weight = move |rate: &u64| (*rate as f64 / most * f64::from(largest)).round().max(1.0);
        bandwidths.iter().map(move |(node, rate)| (*node, weight(rate)))
    };
    let off = |largest: u32| {
        let off = |(node, weight): (u32, f64)| {
            let exact = bandwidths[&node] as f64 / most * f64::from(largest);
            (weight / exact - 1.0).abs()
        };
        weights(largest).map(off).fold(0.0, f64::max)
    };
    let largest = (1..=LARGEST).find(|largest| off(*largest) <= MOST_OFF).unwrap_or(LARGEST);
    weights(largest).map(|(node, weight)| (node, weight as u8)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Policy::parse(text).expect_err("it is refused").to_string()
    }

    #[test]
    fn a_service_says_more_than_its_profile_and_units_without_a_line_have_the_default() {
        let profiles = "default = \"batch\"\n[profile.batch]\ntier = \"background\"\n[profile.web]\ntier = \"opt-in\"\nlocal_low = 0.5\nlocal_high = 0.8\n";
        let services = "[service.a]\nunit = \"a.service\"\nprofile = \"web\"\n[service.b]\nunit = \"b.service\"\nprofile = \"web\"\nlocal_high = 0.9\n";
        let policy = Policy::parse(&format!("{profiles}{services}")).unwrap();
        let bounds = |index: usize| policy.services[index].policy.local.map(|it| (it.low, it.high));
        assert_eq!((bounds(0), bounds(1)), (Some((0.5, 0.8)), Some((0.5, 0.9))));
        assert_eq!((policy.services[0].lines.service, policy.services[0].lines.tier), (9, 5));
        assert_eq!(policy.services[1].lines.local_high, Some(14));
        let (default, lines) = policy.default.unwrap();
        assert_eq!((default.rule, lines.tier), (TierRule::Background, 3));
        for (text, expected) in [
            (
                "default = \"x\"\n".to_owned(),
                "line 1: default = \"x\" is not a profile of this file; it has none",
            ),
            (
                format!("{profiles}[service.a]\nunit = \"a.service\"\nprofile = \"wbe\"\n"),
                "line 10: service.a.profile = \"wbe\" is not a profile of this file; it has batch, web",
            ),
            ("[profile.a]\nlocal_low = 0.5\n".to_owned(), "line 2: profile.a: missing field `tier`"),
            (
                "[profile.a]\ntier = \"background\"\nlocal_low = 0.5\n".to_owned(),
                "line 2: profile.a: local_low and local_high apply to tier = \"opt-in\" alone",
            ),
            ("[profile.a]\ntier = \"opt-in\"\nunit = \"a.service\"\n".to_owned(), "unknown field `unit`"),
        ] {
            assert!(refused(&text).contains(expected), "{}", refused(&text));
        }
    }

    #[test]
    fn the_policy_of_the_daemonset_is_one() {
        let (_, text) = crate::DAEMONSET.split_once("agent.toml: |\n").unwrap();
        let text: String = text
            .split("---")
            .next()
            .unwrap()
            .lines()
            .map(|line| line.trim_start().to_owned() + "\n")
            .collect();
        assert_eq!(Policy::parse(&text).unwrap().services[0].name, "burstable");
    }

    #[test]
    fn each_mistake_is_one_line_with_its_key() {
        let service = |rest: &str| format!("[service.a]\ncgroup = \"/a\"\n{rest}");
        for (text, expected) in [
            ("period = \"soon\"", "line 1: period = \"soon\" is not a time from 1ms to 1h, such as \"2s\""),
            ("period = \"0s\"", "line 1: period = \"0s\" is not a time from 1ms to 1h, such as \"2s\""),
            ("period = \"1ns\"", "line 1: period = \"1ns\" is not a time from 1ms to 1h, such as \"2s\""),
            ("[service.\"\"]\ncgroup = \"/a\"\ntier = \"opt-in\"", "line 3: a service is named \"\""),
            (
                "[service.\"a\\nb\"]\ncgroup = \"/a\"\ntier = \"opt-in\"",
                "line 3: a service is named \"a\\nb\"; expected a name without control characters",
            ),
            (
                "[service.a]\ncgroup = \"/a\\u001b[2J\"\ntier = \"opt-in\"",
                "line 2: service.a.cgroup = \"/a\\u{1b}[2J\" is not a cgroup's path",
            ),
            (
                "[service.a]\nunit = \"a\\nb.service\"\ntier = \"opt-in\"",
                "line 2: service.a.unit = \"a\\nb.service\" is not one unit",
            ),
            ("\nstep = \"many\"", "line 2: step = \"many\" is not a size such as \"32MiB\""),
            ("pressure_limit = 0.0", "line 1: pressure_limit = 0.0 is not a percentage above 0"),
            ("refault_limit = -1", "line 1: refault_limit: invalid value"),
            ("free_low = 0.1\nfree_high = 0.05", "line 2: free_high = 0.05 is not at least free_low (0.1)"),
            (
                "promotion_limit = \"fast\"",
                "line 1: promotion_limit = \"fast\" is not a rate such as \"200MB/s\"",
            ),
            ("[interleave]\nweights = \"some\"", "interleave: expected weights = \"auto\", or a table"),
            (
                "[interleave]\nweights = { 0 = 3, \"00\" = 1 }",
                "interleave: expected weights = \"auto\", or a table",
            ),
            ("free_high = 0.5", "line 1: free_high = 0.5 is not of use without free_low"),
            ("period = \"500y\"", "line 1: period = \"500y\" is not a time from 1ms to 1h"),
            ("[interleave]\nweights = { 0 = 300 }", "interleave: expected weights = \"auto\", or a table"),
            (
                "[health]\nbad_memory = \"replace\"",
                "line 2: health.bad_memory: unknown variant `replace`, expected one of `alarm`",
            ),
            (
                &service("tier = \"opt-in\"\nnamespace = \"shop\""),
                "line 4: service.a.namespace = \"shop\" is not of use without label",
            ),
            (
                "[service.a]\nlabel = \"app\"\ntier = \"opt-in\"",
                "line 2: service.a.label = \"app\" is not labels such as \"app=web\"",
            ),
            (
                "[service.a]\nlabel = \"app=web\"\ntier = \"opt-in\"",
                "line 2: service.a: label needs to know the pods",
            ),
            ("[service.\"a/b\"]\nlabel = \"app=web\"\ntier = \"opt-in\"", "has no \"/\""),
            (
                "[kubernetes]\npods = \"http://10.0.0.1:10255/pods\"",
                "line 2: kubernetes.pods = \"http://10.0.0.1:10255/pods\" is not an address of this host",
            ),
            ("[kubernetes]\npods = \"https://127.0.0.1:10250/pods\"", "is not an address of this host"),
            ("[kubernetes]\npods = \"http://127.0.0.1:1@10.0.0.1/pods\"", "is not an address of this host"),
            (
                "[kubernetes]\npods = \"/p\"\ncgroup_root = \"../x\"",
                "kubernetes.cgroup_root = \"../x\" is not a path",
            ),
            ("[health]", "health: missing field `bad_memory`"),
            ("pace = 1", "line 1: pace: unknown field `pace`, expected one of `period`"),
            (
                &service("tier = \"out\""),
                "line 3: service.a.tier: unknown variant `out`, expected one of `opt-in`",
            ),
            (&service("tier = 3"), "line 3: service.a.tier"),
            (&service("local_low = 0.5"), "service.a: missing field `tier`"),
            (
                &service("tier = \"opt-in\"\nlocal_low = 2.0"),
                "line 4: service.a.local_low = 2.0 is not a share from 0 to 1",
            ),
            (&service("tier = \"opt-in\"\nlocal_low = nan"), "service.a.local_low = NaN is not a share"),
            (
                &service("tier = \"opt-in\"\nlocal_low = \"x\""),
                "line 4: service.a.local_low: invalid type: string \"x\", expected a share from 0 to 1, such as 0.5",
            ),
            (
                "free_low = \"50%\"",
                "line 1: free_low: invalid type: string \"50%\", expected a share from 0 to 1, such as 0.5",
            ),
            (
                "pressure_limit = \"10%\"",
                "line 1: pressure_limit: invalid type: string \"10%\", expected a percentage above 0, such as 10.0",
            ),
            ("step = 33554432", "integer `33554432`, expected a size such as \"32MiB\""),
            ("step = \"1B\"", "step = \"1B\" is not a size such as \"32MiB\", of a page (4KiB) at least"),
            ("refault_limit = 1.5", "floating point `1.5`, expected pages a second, such as 1000"),
            ("step = \"99999EiB\"", "step = \"99999EiB\" is not a size such as \"32MiB\""),
            ("step = \"32Mb\"", "step = \"32Mb\" is not a size such as \"32MiB\""),
            ("promotion_limit = \"200Mb/s\"", "is not a rate such as \"200MB/s\", from 1MB/s to 1PB/s"),
            ("promotion_limit = \"900PB/s\"", "is not a rate such as \"200MB/s\", from 1MB/s to 1PB/s"),
            ("promotion_limit = \"999kB/s\"", "is not a rate such as \"200MB/s\", from 1MB/s to 1PB/s"),
            (
                "[service.a]\nunit = \"web*.service\"\ntier = \"opt-in\"",
                "line 2: service.a.unit = \"web*.service\" is not one unit such as \"web.service\"; a profile and `default` are for many",
            ),
            ("[service.a]\nunit = \"web@.service\"\ntier = \"opt-in\"", "\"web@.service\" is not one unit"),
            (
                "[service.a]\nlabel = \"app=web,app=api\"\ntier = \"opt-in\"",
                "line 2: service.a.label = \"app=web,app=api\" is not labels such as \"app=web\", with a comma between two of different keys",
            ),
            (
                "[service.a]\nlabel = \"app=web\"\nnamespace = \"\"\ntier = \"opt-in\"",
                "line 3: service.a.namespace = \"\" is not a namespace",
            ),
            (&service("tier = true"), "expected \"opt-in\", \"opt-out\" or \"background\""),
            (
                "service.a = 3",
                "line 1: service.a: invalid type: integer `3`, expected a table, such as [health] or [service.web]",
            ),
            ("health = 3", "line 1: health: invalid type: integer `3`, expected a table"),
            (
                &service("tier = \"opt-in\"\nlocal_low = 0.8\nlocal_high = 0.5"),
                "line 4: service.a.local_low = 0.8 is not at most local_high (0.5)",
            ),
            (&service("tier = \"opt-out\"\nlocal_low = 0.5"), "apply to tier = \"opt-in\" alone"),
            (&service("tier = \"opt-out\"\npage_cache = \"slow\""), "contradicts tier = \"opt-out\""),
            (
                &service("unit = \"a.service\"\ntier = \"opt-in\""),
                "expected one of cgroup = \"/PATH\", unit = \"NAME.service\" or label = \"KEY=VALUE\"",
            ),
            ("[service.a]\ntier = \"opt-in\"", "line 2: service.a: expected one of cgroup"),
            (
                "[service.a]\nunit = \"web\"\ntier = \"opt-in\"",
                "line 2: service.a.unit = \"web\" is not one unit such as \"web.service\"",
            ),
            (
                "[service.a]\ncgroup = \"a/../b\"\ntier = \"opt-in\"",
                "line 2: service.a.cgroup = \"a/../b\" is not a cgroup's path",
            ),
            (
                "[service.a]\ncgroup = \"/a\"\ntier = \"opt-in\"\n[service.b]\ncgroup = \"/a\"\ntier = \"opt-in\"",
                "service.b: \"/a\" is that of service.a too",
            ),
        ] {
            let message = refused(text);
            assert!(message.contains(expected) && !message.contains('\n'), "{text:?}: {message}");
        }
    }

    #[test]
    fn a_path_with_the_mount_in_front_is_warned_of() {
        let text = "[kubernetes]\npods = \"/p\"\ncgroup_root = \"/sys/fs/cgroup/kubelet\"\n\
            [service.a]\ncgroup = \"/sys/fs/cgroup/x\"\ntier = \"opt-in\"\n\
            [service.b]\ncgroup = \"/sys/fs/cgroupx\"\ntier = \"opt-in\"\n";
        assert_eq!(
            Policy::parse(text).unwrap().warnings,
            [
                "line 3: kubernetes.cgroup_root = \"/sys/fs/cgroup/kubelet\" names /sys/fs/cgroup/sys/fs/cgroup/kubelet, \
                 because it is a path below /sys/fs/cgroup; write \"/kubelet\"",
                "line 5: service.a.cgroup = \"/sys/fs/cgroup/x\" names /sys/fs/cgroup/sys/fs/cgroup/x, \
                 because it is a path below /sys/fs/cgroup; write \"/x\"",
            ]
        );
    }

    #[test]
    fn a_path_that_looks_like_a_pattern_is_warned_of() {
        let text = "[service.a]\ncgroup = \"/app.slice/*\"\ntier = \"opt-in\"\n";
        assert_eq!(
            Policy::parse(text).unwrap().warnings,
            [
                "line 2: service.a.cgroup = \"/app.slice/*\" names one cgroup, and is no pattern; write `default` and a profile for all that have no service"
            ]
        );
    }

    #[test]
    fn every_key_is_read() {
        let text = "period = \"1s\"\nstep = \"8MiB\"\npressure_limit = 5.0\nrefault_limit = 20\nfree_low = 0.02\nfree_high = 0.04\n\
            promotion_limit = \"300MB/s\"\nhealth.bad_memory = \"drain\"\n[interleave]\nweights = { 0 = 3, 1 = 1 }\n\
            [service.a]\nunit = \"a.service\"\ntier = \"opt-in\"\npage_cache = \"slow\"\n";
        let policy = Policy::parse(text).unwrap();
        assert_eq!((policy.refaults_a_round(), policy.promotion_limit), (20, Some(300_000_000)));
        assert_eq!(policy.weights, Some(Weights::Given(BTreeMap::from([(0, 3), (1, 1)]))));
        assert_eq!(policy.health, Some(HealthPolicy { bad_memory: BadMemory::Drain, line: 8 }));
        let service = &policy.services[0];
        assert_eq!((service.place.name(), service.policy.slow_cache), ("a.service".to_owned(), true));
        assert_eq!((service.lines.tier, service.lines.page_cache), (13, Some(14)));
    }

    #[test]
    fn weights_by_auto_are_small_and_in_proportion() {
        let of = |rates: &[u64]| {
            let rates = rates.iter().enumerate().map(|(node, rate)| (node as u32, *rate)).collect();
            weights_of(&rates).into_values().collect::<Vec<_>>()
        };
        assert_eq!(of(&[20_480, 5_120]), [4, 1]);
        assert_eq!(of(&[200, 200]), [1, 1]);
        assert_eq!(of(&[300, 200]), [3, 2]);
        assert_eq!(of(&[10_000, 1]), [32, 1], "a node never gets nothing");
    }
}
