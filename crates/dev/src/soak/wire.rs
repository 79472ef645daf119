//! What the processes of a soak say to each other outside the pool: lines of text through a pair of sockets.
//! Between two machines they go over TCP.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::Failure;

/// Longer than any deadline of a pool: a process that says nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// One end of a conversation.
#[derive(Debug)]
pub(super) struct Wire {
    stream: BufReader<UnixStream>,
    /// The beginning of a line whose end has not come.
    line: String,
}

impl Wire {
    /// Both ends of a new one.
    pub(super) fn pair() -> Result<(Self, Self), Failure> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self::over(one), Self::over(other)))
    }

    /// This end of a connection to another machine.
    pub(super) fn to_machine(stream: TcpStream) -> Result<Self, Failure> {
        stream.set_nodelay(true)?;
        // Its calls are those of any socket.
        Ok(Self::over(UnixStream::from(OwnedFd::from(stream))))
    }

    fn over(stream: UnixStream) -> Self {
        Self { stream: BufReader::new(stream), line: String::new() }
    }

    /// Says a line.
    pub(super) fn say(&mut self, words: &str) -> Result<(), Failure> {
        // In one piece: a process that is killed has said all of it or nothing.
        self.stream.get_mut().write_all(format!("{words}\n").as_bytes())?;
        Ok(())
    }

    /// The next line; `None` when the other end is gone and has said nothing more.
    pub(super) fn hear(&mut self) -> Result<Option<String>, Failure> {
        let heard = self.hear_within(PATIENCE, || true)?;
        heard.ok_or_else(|| Failure(format!("a process said nothing for {} s: it hangs", PATIENCE.as_secs())))
    }

    /// The next line, for as long as `goes_on`; `None` when it does not any more.
    pub(super) fn hear_while(&mut self, goes_on: impl Fn() -> bool) -> Result<Option<String>, Failure> {
        Ok(self.hear_within(Duration::MAX, goes_on)?.flatten())
    }

    /// The next line, or that there is none within `patience`.
    pub(super) fn hear_soon(&mut self, patience: Duration) -> Result<Option<Option<String>>, Failure> {
        self.hear_within(patience, || true)
    }

    fn hear_within(
        &mut self,
        patience: Duration,
        goes_on: impl Fn() -> bool,
    ) -> Result<Option<Option<String>>, Failure> {
        let start = Instant::now();
        self.stream.get_ref().set_read_timeout(Some(patience.min(Duration::from_secs(1))))?;
        while start.elapsed() < patience && goes_on() {
            match self.stream.read_line(&mut self.line) {
                Ok(0) => return Ok(Some(None)),
                Ok(_) => return Ok(Some(Some(std::mem::take(&mut self.line).trim_end().to_owned()))),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(Some(None)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}
