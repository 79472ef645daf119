//! Answers Prometheus: `GET /metrics` and its head, and nothing else.
//!
//! Any user of the host can connect, and the agent runs as root. So all that clients can make it spend is bounded: clients at a time, bytes
//! of a request, time of an answer. A request with a body is refused unread. The client that has done nothing for longest gives way to a
//! new one. The thread has nothing of the control loop but the text of the last round.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};

/// What is answered, as it is now.
pub type Text = Box<dyn Fn() -> Arc<str> + Send>;

/// Clients at a time.
const MOST_CLIENTS: usize = 32;
/// Bytes of a request.
const MOST_BYTES: usize = 4096;
/// Header lines of a request.
const MOST_HEADERS: usize = 64;
/// From a connection to the end of its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Until the next try, where the kernel has no room for a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Listens at an address, and answers in a thread that ends with the process. Returns the address, whose port the kernel may have chosen.
///
/// # Errors
/// As the kernel refuses the address.
pub fn listen(address: SocketAddr, text: Text) -> io::Result<SocketAddr> {
    let mut endpoint = Endpoint::new(address, text)?;
    let address = endpoint.listener.local_addr()?;
    std::thread::Builder::new().name("metrics".to_owned()).spawn(move || {
        loop {
            if endpoint.turn(Instant::now()).is_err() {
                std::thread::sleep(PAUSE);
            }
        }
    })?;
    Ok(address)
}

struct Endpoint {
    poll: Poll,
    events: Events,
    listener: TcpListener,
    /// Whether there may be connections that were not accepted.
    is_asked: bool,
    text: Text,
    /// The oldest first.
    clients: Vec<Client>,
    next: Token,
}

struct Client {
    stream: TcpStream,
    token: Token,
    since: Instant,
    /// When it last sent or took something.
    active: Instant,
    request: Vec<u8>,
    answer: Option<Answer>,
}

struct Answer {
    head: String,
    body: Arc<str>,
    /// Bytes that the client has taken.
    sent: usize,
}

const LISTENER: Token = Token(0);

impl Endpoint {
    fn new(address: SocketAddr, text: Text) -> io::Result<Self> {
        let (poll, mut listener) = (Poll::new()?, TcpListener::bind(address)?);
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let events = Events::with_capacity(MOST_CLIENTS);
        Ok(Self { poll, events, listener, is_asked: false, text, clients: Vec::new(), next: Token(1) })
    }

    /// Waits until a client can go on, or its time is over; then takes one more.
    fn turn(&mut self, now: Instant) -> io::Result<()> {
        self.clients.retain(|client| now < client.since + PATIENCE);
        let patience = match self.is_asked {
            true => Some(Duration::ZERO),
            false => self.clients.first().map(|oldest| oldest.since + PATIENCE - now),
        };
        match self.poll.poll(&mut self.events, patience) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            polled => polled?,
        }
        let ready: BTreeSet<Token> = self.events.iter().map(|event| event.token()).collect();
        let text = &*self.text;
        self.clients.retain_mut(|client| !ready.contains(&client.token) || client.goes_on(text));
        self.is_asked |= ready.contains(&LISTENER);
        if self.is_asked { self.accept(now) } else { Ok(()) }
    }

    fn accept(&mut self, now: Instant) -> io::Result<()> {
        let mut stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.is_asked = false;
                return Ok(());
            }
            Err(error) => {
                // There may be no room for another file.
                self.drop_idlest();
                return Err(error);
            }
        };
        if self.clients.len() >= MOST_CLIENTS {
            self.drop_idlest();
        }
        let token = self.next;
        self.next = Token(token.0 + 1);
        self.poll.registry().register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        let mut client = Client { stream, token, since: now, active: now, request: Vec::new(), answer: None };
        if client.goes_on(&*self.text) {
            self.clients.push(client);
        }
        Ok(())
    }

    fn drop_idlest(&mut self) {
        let idlest = self.clients.iter().enumerate().min_by_key(|(_, client)| client.active);
        if let Some((index, _)) = idlest {
            self.clients.remove(index);
        }
    }
}

impl Client {
    /// Whether more is to come of it, or to go to it.
    fn goes_on(&mut self, text: &dyn Fn() -> Arc<str>) -> bool {
        matches!(self.go_on(text), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    /// Reads and writes as far as it goes without waiting.
    fn go_on(&mut self, text: &dyn Fn() -> Arc<str>) -> io::Result<()> {
        let mut part = [0; 1024];
        while self.answer.is_none() {
            let room = part.len().min(MOST_BYTES - self.request.len());
            let count = self.stream.read(&mut part[..room])?;
            if count == 0 {
                return Ok(());
            }
            self.active = Instant::now();
            self.request.extend_from_slice(&part[..count]);
            self.answer = answer(&self.request, text);
        }
        let Some(Answer { head, body, sent }) = &mut self.answer else { return Ok(()) };
        while *sent < head.len() + body.len() {
            let rest = head.as_bytes().get(*sent..).filter(|rest| !rest.is_empty());
            *sent += self.stream.write(rest.unwrap_or_else(|| &body.as_bytes()[*sent - head.len()..]))?;
            self.active = Instant::now();
        }
        Ok(())
    }
}

/// The answer to a request; [`None`] while more of it is to come.
fn answer(request: &[u8], text: &dyn Fn() -> Arc<str>) -> Option<Answer> {
    const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    let outcome = parsed.parse(request);
    let has_body = |header: &&mut httparse::Header<'_>| {
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        is("transfer-encoding") || (is("content-length") && header.value.trim_ascii() != b"0")
    };
    let (status, words) = match outcome {
        Ok(httparse::Status::Partial) if request.len() < MOST_BYTES => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            ("431 Request Header Fields Too Large", "a request has 4,096 bytes and 64 header lines at most\n")
        }
        Err(_) => ("400 Bad Request", "expected a request of HTTP/1.1\n"),
        Ok(_) if parsed.headers.iter_mut().any(|header| has_body(&header)) => {
            ("413 Content Too Large", "a request has no body here\n")
        }
        Ok(_) => match (parsed.method, parsed.path.map(path_of)) {
            (Some("GET" | "HEAD"), Some("/metrics")) => ("200 OK", ""),
            (Some("GET" | "HEAD"), _) => ("404 Not Found", "the metrics are at /metrics\n"),
            _ => ("405 Method Not Allowed\r\nAllow: GET, HEAD", "the metrics are read by GET\n"),
        },
    };
    let (kind, mut body) = match words {
        "" => (OPENMETRICS, text()),
        words => ("text/plain; charset=utf-8", words.into()),
    };
    let head = format!(
        "HTTP/1.{} {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        parsed.version.unwrap_or(1),
        body.len()
    );
    if parsed.method == Some("HEAD") {
        // RFC 9110, section 9.3.2: the head alone, as that of a GET.
        body = "".into();
    }
    Some(Answer { head, body, sent: 0 })
}

/// The path of a request's target. A query is ignored, and so are the scheme and the host that a proxy may name: RFC 9112, section 3.2.2.
fn path_of(target: &str) -> &str {
    let path = match target.strip_prefix("http://") {
        Some(rest) => rest.find(['/', '?']).map_or("/", |at| &rest[at..]),
        None => target,
    };
    path.split('?').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{Endpoint, Instant, Read, SocketAddr, Text, Write};
    use super::{MOST_CLIENTS, PATIENCE, answer, listen};
    use crate::Metrics;
    use std::net::{Ipv4Addr, TcpStream};

    fn text() -> Text {
        let metrics = Metrics::new();
        Box::new(move || metrics.text())
    }

    fn endpoint() -> SocketAddr {
        listen((Ipv4Addr::LOCALHOST, 0).into(), text()).unwrap()
    }

    /// All that comes back for these bytes.
    fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = Vec::new();
        // What was not read of a request resets the connection behind the answer.
        drop(stream.read_to_end(&mut answer));
        String::from_utf8(answer).unwrap()
    }

    fn gets_metrics(address: SocketAddr) -> bool {
        let answer = ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("# EOF\n")
    }

    #[test]
    fn one_path_is_answered_and_nothing_else() {
        let address = endpoint();
        assert!(gets_metrics(address));
        for (request, status) in [
            ("GET / HTTP/1.0\r\n\r\n", "HTTP/1.0 404"),
            ("GET /../etc/passwd HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
            ("GET /?/metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
            ("GET http://localhost?/metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
            ("HEAD / HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
            ("OPTIONS /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\n"),
            ("GET /metrics HTTP/9.9\r\n\r\n", "HTTP/1.1 400"),
            ("GET/metricsHTTP/1.1\r\n\r\n", "HTTP/1.1 400"),
            ("\0\u{1}\u{2}\r\n\r\n", "HTTP/1.1 400"),
            ("POST /metrics HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n", "HTTP/1.1 413"),
            ("GET /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 413"),
            (
                "POST /metrics HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
                "HTTP/1.1 413",
            ),
        ] {
            let answer = ask(address, request.as_bytes());
            assert!(answer.starts_with(status), "{request:?}: {answer:?}");
        }
        for (line, status) in [("a: b\r\n".repeat(100), "HTTP/1.1 431"), ("a".repeat(5000), "HTTP/1.1 431")] {
            let request = format!("GET /metrics HTTP/1.1\r\n{line}");
            assert!(ask(address, request.as_bytes()).starts_with(status), "{status}");
        }
        assert!(gets_metrics(address));
    }

    #[test]
    fn a_query_is_ignored_and_a_head_is_that_of_a_get_alone() {
        let address = endpoint();
        for target in
            ["/metrics?x=1", "/metrics?", "http://localhost:9586/metrics", "http://localhost/metrics?x=/"]
        {
            let answer = ask(address, format!("GET {target} HTTP/1.1\r\n\r\n").as_bytes());
            assert!(
                answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("# EOF\n"),
                "{target}: {answer}"
            );
            let head = ask(address, format!("HEAD {target} HTTP/1.1\r\n\r\n").as_bytes());
            let (head_of_get, _) = answer.split_once("\r\n\r\n").unwrap();
            assert_eq!(head, format!("{head_of_get}\r\n\r\n"), "{target}");
        }
        let answer = ask(address, b"HEAD / HTTP/1.1\r\n\r\n");
        assert!(answer.ends_with("\r\n\r\n"), "{answer}");
    }

    #[test]
    fn a_request_may_come_byte_by_byte_and_end_early() {
        let metrics = text();
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";
        for end in 0..request.len() {
            assert!(answer(&request[..end], &metrics).is_none(), "{end}");
        }
        assert!(answer(request, &metrics).unwrap().head.starts_with("HTTP/1.1 200"));
        let mut stream = TcpStream::connect(endpoint()).unwrap();
        stream.write_all(&request[..9]).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 0);
    }

    /// Files of this process that are sockets of a server at this port.
    fn connections(address: SocketAddr) -> usize {
        let port = format!("0100007F:{:04X}", address.port());
        let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        let established = table.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            (fields.get(1) == Some(&port.as_str()) && fields.get(3) == Some(&"01"))
                .then(|| fields[9].to_owned())
        });
        established.filter(|inode| inode != "0").count()
    }

    #[test]
    fn silent_clients_and_those_that_never_read_keep_no_other_from_an_answer() {
        let address = endpoint();
        let mut clients = Vec::new();
        for index in 0..8 * MOST_CLIENTS {
            let mut stream = TcpStream::connect(address).unwrap();
            let request: &[u8] = match index % 3 {
                0 => b"GET /metr",
                1 => b"GET /metrics HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n",
                _ => b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            };
            // The client before the last may have been dropped already.
            drop(stream.write_all(request));
            clients.push(stream);
            assert!(gets_metrics(address), "beside {index} others");
            assert!(connections(address) <= MOST_CLIENTS + 1, "beside {index} others");
        }
    }

    #[test]
    fn a_client_has_ten_seconds_and_the_idlest_gives_way_to_a_new_one() {
        let mut endpoint = Endpoint::new((Ipv4Addr::LOCALHOST, 0).into(), text()).unwrap();
        let address = endpoint.listener.local_addr().unwrap();
        let start = Instant::now();
        let connect = |endpoint: &mut Endpoint, now| {
            let stream = TcpStream::connect(address).unwrap();
            endpoint.turn(now).unwrap();
            stream
        };
        let mut streams: Vec<TcpStream> = (0..MOST_CLIENTS).map(|_| connect(&mut endpoint, start)).collect();
        assert_eq!(endpoint.clients.len(), MOST_CLIENTS);
        streams[0].write_all(b"GET ").unwrap();
        endpoint.turn(start).unwrap();
        let first = endpoint.clients[0].stream.peer_addr().unwrap();
        streams.push(connect(&mut endpoint, start + PATIENCE / 2));
        assert_eq!(endpoint.clients.len(), MOST_CLIENTS);
        assert_eq!(endpoint.clients[0].stream.peer_addr().unwrap(), first, "it has done something since");
        streams.push(connect(&mut endpoint, start + PATIENCE));
        assert_eq!(endpoint.clients.len(), 2, "all but the last two are over");
    }
}
