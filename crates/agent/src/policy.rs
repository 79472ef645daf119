//! The policy file: what an operator wants of the services of a host.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytesize::ByteSize;
use polder_linux::{BALANCING, Cgroup, DEMOTION};
use polder_place::pages::{LocalBounds, ServicePolicy, TierRule};
use serde::Deserialize;

/// Why a policy file is refused: one line that names the key, the value and what was expected.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PolicyError(String);

/// One service of a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// The operator's name for it.
    pub name: String,
    /// Where its tasks are.
    pub cgroup: Cgroup,
    /// What is wanted of it.
    pub policy: ServicePolicy,
}

/// What an operator wants of a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Time from one control round to the next.
    pub period: Duration,
    /// Bytes that are demoted in one round at most.
    pub step_bytes: u64,
    /// A service that waits for memory for more than this percentage of ten seconds is left alone.
    pub pressure_limit: f64,
    /// Services by name.
    pub services: Vec<Service>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default = "default_period")]
    period: String,
    #[serde(default = "default_step")]
    step: String,
    #[serde(default = "default_pressure")]
    pressure_limit: f64,
    #[serde(default)]
    service: BTreeMap<String, FileService>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileService {
    cgroup: String,
    tier: FileRule,
    local_low: Option<f64>,
    local_high: Option<f64>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FileRule {
    OptIn,
    OptOut,
    Background,
}

fn default_period() -> String {
    "2s".to_owned()
}

fn default_step() -> String {
    "32MiB".to_owned()
}

const fn default_pressure() -> f64 {
    10.0
}

impl Policy {
    /// Reads the text of a policy file.
    ///
    /// ```
    /// let policy = polder_agent::Policy::parse(
    ///     "[service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\nlocal_low = 0.6\nlocal_high = 0.8\n",
    /// ).unwrap();
    /// assert_eq!(policy.services[0].name, "cache");
    /// ```
    ///
    /// # Errors
    /// [`PolicyError`] with the key at fault.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let file: File = toml::from_str(text).map_err(|error| PolicyError(one_line(text, &error)))?;
        let period = humantime::parse_duration(&file.period)
            .ok()
            .filter(|period| !period.is_zero())
            .ok_or_else(|| PolicyError(format!("period = {:?} is not a time such as \"2s\"", file.period)))?;
        let step_bytes = file.step.parse::<ByteSize>().map_or(0, |size| size.as_u64());
        if step_bytes == 0 {
            return Err(PolicyError(format!("step = {:?} is not a size such as \"32MiB\"", file.step)));
        }
        if !(file.pressure_limit > 0.0 && file.pressure_limit <= 100.0) {
            let limit = file.pressure_limit;
            return Err(PolicyError(format!("pressure_limit = {limit} is not a percentage above 0")));
        }
        let services: Vec<Service> = file
            .service
            .into_iter()
            .map(|(name, service)| service.checked(name))
            .collect::<Result<_, _>>()?;
        let mut owners = BTreeMap::new();
        for service in &services {
            if let Some(other) = owners.insert(service.cgroup.path(), &service.name) {
                let cgroup = service.cgroup.path();
                return Err(PolicyError(format!(
                    "service.{}.cgroup = {cgroup:?} is that of service.{other} too",
                    service.name
                )));
            }
        }
        Ok(Self { period, step_bytes, pressure_limit: file.pressure_limit, services })
    }
}

impl Policy {
    /// The files of the settings that this policy asks for.
    pub(crate) fn settings(&self) -> BTreeSet<String> {
        let mut paths = BTreeSet::new();
        if !self.services.is_empty() {
            paths.extend([DEMOTION.to_owned(), BALANCING.to_owned()]);
        }
        let opted_out = self.services.iter().filter(|service| service.policy.rule == TierRule::OptOut);
        paths.extend(opted_out.map(|service| service.cgroup.file("cpuset.mems")));
        paths
    }
}

impl FileService {
    fn checked(self, name: String) -> Result<Service, PolicyError> {
        let wrong = |key: &str, value: String, expected: &str| {
            Err(PolicyError(format!("service.{name}.{key} = {value} is not {expected}")))
        };
        let Some(cgroup) = Cgroup::new(&self.cgroup) else {
            let expected = "a cgroup's path below the mount, such as \"/system.slice/web.service\"";
            return wrong("cgroup", format!("{:?}", self.cgroup), expected);
        };
        for (key, value) in [("local_low", self.local_low), ("local_high", self.local_high)] {
            if let Some(share) = value.filter(|share| !(0.0..=1.0).contains(share)) {
                return wrong(key, share.to_string(), "a share from 0 to 1");
            }
        }
        let (low, high) = (self.local_low.unwrap_or(0.0), self.local_high.unwrap_or(1.0));
        if low > high {
            return wrong("local_low", low.to_string(), &format!("at most local_high ({high})"));
        }
        let rule = match self.tier {
            FileRule::OptIn => TierRule::OptIn,
            FileRule::OptOut => TierRule::OptOut,
            FileRule::Background => TierRule::Background,
        };
        let is_bounded = self.local_low.is_some() || self.local_high.is_some();
        if is_bounded && rule != TierRule::OptIn {
            return Err(PolicyError(format!(
                "service.{name}: local_low and local_high apply to tier = \"opt-in\" alone; leave them out"
            )));
        }
        let local = is_bounded.then_some(LocalBounds { low, high });
        Ok(Service { name, cgroup, policy: ServicePolicy { rule, local } })
    }
}

/// The first line of a parser's message, with the line of the file.
fn one_line(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
    format!("line {line}: {}", error.message().lines().collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Policy::parse(text).expect_err("it is refused").to_string()
    }

    #[test]
    fn each_mistake_is_one_line_with_its_key() {
        let service = |rest: &str| format!("[service.a]\ncgroup = \"/a\"\n{rest}");
        for (text, expected) in [
            ("period = \"soon\"", "period = \"soon\" is not a time such as \"2s\""),
            ("period = \"0s\"", "period = \"0s\" is not a time such as \"2s\""),
            ("step = \"many\"", "step = \"many\" is not a size such as \"32MiB\""),
            ("pressure_limit = 0", "pressure_limit = 0 is not a percentage above 0"),
            ("pace = 1", "line 1: unknown field `pace`"),
            (&service("tier = \"out\""), "line 3: unknown variant `out`"),
            (
                &service("tier = \"opt-in\"\nlocal_low = 2"),
                "service.a.local_low = 2 is not a share from 0 to 1",
            ),
            (&service("tier = \"opt-in\"\nlocal_low = nan"), "service.a.local_low = NaN is not a share"),
            (
                &service("tier = \"opt-in\"\nlocal_low = 0.8\nlocal_high = 0.5"),
                "service.a.local_low = 0.8 is not at most local_high (0.5)",
            ),
            (&service("tier = \"opt-out\"\nlocal_low = 0.5"), "apply to tier = \"opt-in\" alone"),
            (
                "[service.a]\ncgroup = \"a/../b\"\ntier = \"opt-in\"",
                "service.a.cgroup = \"a/../b\" is not a cgroup's path",
            ),
            (
                "[service.a]\ncgroup = \"/a\"\ntier = \"opt-in\"\n[service.b]\ncgroup = \"/a\"\ntier = \"opt-in\"",
                "service.b.cgroup = \"/a\" is that of service.a too",
            ),
        ] {
            let message = refused(text);
            assert!(message.contains(expected) && !message.contains('\n'), "{text:?}: {message}");
        }
    }
}
