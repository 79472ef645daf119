//! Services by Kubernetes label: the pods of this node, and the cgroups that the kubelet gives them.
//!
//! The agent has no credentials for Kubernetes. Pods come from the kubelet's read-only port of this host, or from a file of the same form
//! that something else writes: `kubectl get pods -o json`.

use std::collections::{BTreeMap, BTreeSet};

use polder_linux::{Cgroup, Kernel, KernelError};
use serde::Deserialize;

use crate::Name;
use crate::policy::{Kubernetes, Selector};

/// From one look at the pods to the next.
const REFRESH_MS: u64 = 10_000;

/// A pod of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) name: Name,
    pub(crate) namespace: String,
    labels: BTreeMap<String, String>,
    /// Identifiers that its cgroup may have. A static pod's is that of its file, which the API gives as an annotation.
    ids: Vec<String>,
    /// As a part of the cgroup's path: `burstable`, `besteffort`, or nothing for a guaranteed pod.
    class: Option<&'static str>,
}

/// The pods of this node, as far as they are known.
#[derive(Debug, Default)]
pub(crate) struct Pods {
    list: Vec<Pod>,
    next_ms: u64,
    /// Why the last look failed: the pods of the one before go on.
    pub(crate) failure: Option<String>,
}

impl Pods {
    /// Forgets when it looked, so that the next round does.
    pub(crate) const fn look_next(&mut self) {
        self.next_ms = 0;
    }

    /// Looks at the pods, if it is time.
    pub(crate) fn look(&mut self, kernel: &impl Kernel, from: &Kubernetes, now_ms: u64) {
        // A clock that was set back leaves the next look further away than one can be.
        if (self.next_ms.saturating_sub(REFRESH_MS)..self.next_ms).contains(&now_ms) {
            return;
        }
        self.next_ms = now_ms + REFRESH_MS;
        let text = match from.pods.starts_with('/') {
            true => kernel.read_own(&from.pods),
            false => kernel.fetch(&from.pods),
        };
        let read = text
            .map_err(|error| error.to_string())
            .and_then(|text| Pod::all(&text).map_err(|why| format!("{}: {why}", from.pods)));
        self.failure = read.map(|list| self.list = list).err();
    }

    /// Pods that a selector selects, or why there is none.
    pub(crate) fn select(&self, selector: &Selector) -> Result<Vec<&Pod>, String> {
        let selected: Vec<&Pod> = self.list.iter().filter(|pod| pod.is_selected(selector)).collect();
        if !selected.is_empty() {
            return Ok(selected);
        }
        let of_namespace = |pod: &&Pod| selector.namespace.as_ref().is_none_or(|name| *name == pod.namespace);
        let pods = || self.list.iter().filter(of_namespace);
        if let Some(namespace) = selector.namespace.as_ref().filter(|_| pods().next().is_none()) {
            return Err(format!("no pod of this node is in the namespace {namespace}"));
        }
        for (key, value) in &selector.labels {
            let values: BTreeSet<&str> =
                pods().filter_map(|pod| Some(pod.labels.get(key)?.as_str())).collect();
            if values.is_empty() {
                return Err(format!("no pod of this node has a label {key}"));
            }
            if !values.contains(value.as_str()) {
                const SHOWN: usize = 8;
                let shown = values.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
                return Err(format!("no pod of this node has {key}={value}; its values are {shown}"));
            }
        }
        Err("no pod of this node has all of these labels".to_owned())
    }
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    items: Option<Vec<Item>>,
}

#[derive(Deserialize)]
struct Item {
    metadata: Metadata,
    #[serde(default)]
    status: Status,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    #[serde(default)]
    namespace: String,
    uid: String,
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    phase: String,
    qos_class: String,
}

/// The annotation by which the API names the file of a static pod.
const STATIC: &str = "kubernetes.io/config.hash";

impl Pod {
    /// The pods of a list that have processes.
    fn all(text: &str) -> Result<Vec<Self>, String> {
        let list: List =
            serde_json::from_str(text).map_err(|error| format!("it is no list of pods: {error}"))?;
        let items = list.items.ok_or("it is no list of pods: it has no items")?;
        let runs = |item: &Item| !matches!(item.status.phase.as_str(), "Succeeded" | "Failed");
        items.into_iter().filter(runs).map(Self::checked).collect()
    }

    /// Names become parts of paths, so that no other characters than Kubernetes' own are taken.
    fn checked(item: Item) -> Result<Self, String> {
        let Metadata { name, namespace, uid, labels, annotations } = item.metadata;
        let is_plain = |text: &str| {
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
            (1..=253).contains(&text.len()) && text.chars().all(is_allowed) && !text.contains("..")
        };
        let mut ids = vec![uid];
        ids.extend(annotations.unwrap_or_default().remove(STATIC));
        if let Some(wrong) = ids.iter().chain([&name]).find(|text| !is_plain(text)) {
            return Err(format!("a pod with the name or uid {wrong:?}, which is none of Kubernetes'"));
        }
        let labels = labels.unwrap_or_default();
        let is_label = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
        let words = || labels.iter().flat_map(|(key, value)| [key, value]).chain([&namespace]);
        if let Some(wrong) = words().find(|text| !is_label(text)) {
            return Err(format!("a pod with the label or namespace {wrong:?}, which is none of Kubernetes'"));
        }
        let class = match item.status.qos_class.as_str() {
            "BestEffort" => Some("besteffort"),
            "Burstable" => Some("burstable"),
            _ => None,
        };
        Ok(Self { name: name.into(), namespace, labels, ids, class })
    }

    fn is_selected(&self, selector: &Selector) -> bool {
        let Selector { labels, namespace } = selector;
        namespace.as_ref().is_none_or(|name| *name == self.namespace)
            && labels.iter().all(|(key, value)| self.labels.get(key) == Some(value))
    }

    /// The pod's cgroup below `root`, made by the kubelet's driver systemd or cgroupfs; [`None`] while there is none.
    pub(crate) fn cgroup(&self, kernel: &impl Kernel, root: &str) -> Result<Option<Cgroup>, KernelError> {
        for id in &self.ids {
            let pod = format!("pod{id}");
            let parts: Vec<&str> = root
                .split('/')
                .filter(|part| !part.is_empty())
                .chain(["kubepods"])
                .chain(self.class)
                .chain([pod.as_str()])
                .collect();
            for path in [slices(&parts), format!("/{}", parts.join("/"))] {
                let Some(cgroup) = Cgroup::new(&path) else { continue };
                match kernel.inode(&cgroup.folder()) {
                    Ok(_) => return Ok(Some(cgroup)),
                    Err(error) if error.is_gone() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(None)
    }
}

/// The path of nested slices of systemd, each with the names of all above it in its own; `-` within a name becomes `_`.
fn slices(parts: &[&str]) -> String {
    let (mut path, mut name) = (String::new(), String::new());
    for part in parts {
        if !name.is_empty() {
            name.push('-');
        }
        name += &part.replace('-', "_");
        path += &format!("/{name}.slice");
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use polder_linux::fake::Tree;

    /// The form of what a kubelet answers at /pods.
    const RECORDED: &str = include_str!("../tests/pods.json");

    fn selector(labels: &[(&str, &str)], namespace: Option<&str>) -> Selector {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Selector { labels, namespace: namespace.map(str::to_owned) }
    }

    fn pods() -> Pods {
        Pods { list: Pod::all(RECORDED).unwrap(), ..Pods::default() }
    }

    fn names(pods: &Pods, selector: &Selector) -> Vec<String> {
        pods.select(selector).unwrap().iter().map(|pod| pod.name.to_string()).collect()
    }

    #[test]
    fn pods_are_selected_by_their_labels() {
        let pods = pods();
        assert_eq!(
            names(&pods, &selector(&[("app", "web")], None)),
            ["web-6d4cf56db6-7xk2p", "web-6d4cf56db6-qz9lm", "web-0"]
        );
        assert_eq!(names(&pods, &selector(&[("app", "web")], Some("staging"))), ["web-0"]);
        assert_eq!(
            names(&pods, &selector(&[("app", "web"), ("track", "canary")], None)),
            ["web-6d4cf56db6-qz9lm"]
        );
        for (labels, namespace, expected) in [
            (&[("team", "a")][..], None, "no pod of this node has a label team"),
            (&[("app", "wbe")], None, "has app=wbe; its values are cache, web"),
            (&[("app", "web")], Some("prod"), "in the namespace prod"),
            (&[("app", "cache"), ("track", "canary")], None, "has all of these labels"),
        ] {
            let why = pods.select(&selector(labels, namespace)).expect_err("there is none");
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn cgroups_of_both_drivers_are_found() {
        let pods = pods();
        let find = |root: &str, name: &str, paths: &[&str]| {
            let tree = Tree::new(1 << 20);
            paths.iter().for_each(|path| tree.add_group(path, [0, 0]));
            let pod = pods.list.iter().find(|pod| pod.name == name).unwrap();
            pod.cgroup(&tree, root).unwrap().map(|cgroup| cgroup.path().to_owned())
        };
        let burstable = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podb2c1f8c0_1df0_4c1c_9c6f_7a3de1b0a6f1.slice";
        assert_eq!(find("/", "web-6d4cf56db6-7xk2p", &[burstable]).as_deref(), Some(burstable));
        let plain = "/kubepods/burstable/podb2c1f8c0-1df0-4c1c-9c6f-7a3de1b0a6f1";
        assert_eq!(find("/", "web-6d4cf56db6-7xk2p", &[plain]).as_deref(), Some(plain));
        let nested = format!(
            "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-{}",
            burstable.rsplit('/').next().unwrap()
        );
        assert_eq!(find("/kubelet", "web-6d4cf56db6-7xk2p", &[&nested]), Some(nested.clone()));
        let guaranteed = "/kubepods.slice/kubepods-pod0f4d2f6e_9f0e_4a39_8f6c_5a3c7d1e2b90.slice";
        assert_eq!(find("/", "cache-0", &[guaranteed]).as_deref(), Some(guaranteed));
        // The API gives a static pod another uid than its cgroup has.
        let fixed = "/kubepods/burstable/pod8a1f4e0b1c2d3e4f5a6b7c8d9e0f1a2b";
        assert_eq!(find("/", "kube-proxy-node1", &[fixed]).as_deref(), Some(fixed));
        assert_eq!(find("/", "web-0", &[plain]), None, "it is not there");
    }

    #[test]
    fn a_list_that_is_none_is_refused_and_pods_that_ended_are_left_out() {
        assert!(pods().list.iter().all(|pod| pod.name != "migrate-29301"), "it has succeeded");
        assert_eq!(Pod::all("{\"kind\":\"PodList\",\"items\":[]}").unwrap(), []);
        for (text, expected) in [
            ("Forbidden (user=system:anonymous)", "no list of pods"),
            ("{\"kind\":\"Status\",\"status\":\"Failure\",\"code\":403}", "it has no items"),
            ("{\"items\":[{\"metadata\":{\"name\":\"a\"}}]}", "missing field `uid`"),
            ("{\"items\":[{\"metadata\":{\"name\":\"a\",\"uid\":\"../../x\"}}]}", "\"../../x\""),
            ("{\"items\":[{\"metadata\":{\"name\":\"a/b\",\"uid\":\"1\"}}]}", "\"a/b\""),
            ("{\"items\":[{\"metadata\":{\"name\":\"a\",\"uid\":\"\"}}]}", "\"\""),
            (
                "{\"items\":[{\"metadata\":{\"name\":\"a\",\"uid\":\"1\",\"labels\":{\"app\":\"\\u001b[2J\"}}}]}",
                "label or namespace \"\\u{1b}[2J\"",
            ),
            (
                "{\"items\":[{\"metadata\":{\"name\":\"a\",\"uid\":\"1\",\"namespace\":\"b\\nc\"}}]}",
                "label or namespace \"b\\nc\"",
            ),
        ] {
            let why = Pod::all(text).expect_err(text);
            assert!(why.contains(expected), "{why}");
        }
    }
}
