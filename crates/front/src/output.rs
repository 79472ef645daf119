//! What commands print: where nobody can read it, a command ends with one line that says so.

use std::fmt;
use std::fs::{self, Metadata};
use std::io::{ErrorKind, Result as Written, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Failure;

/// Prints to stdout. That it cannot be printed unwinds to the end of the command.
pub fn print(words: fmt::Arguments<'_>) {
    if let Err(error) = std::io::stdout().write_fmt(words) {
        resume_unwind(Box::new(unwritten(&error)));
    }
}

/// Prints to stderr; of one that cannot be written to nobody can be told.
pub fn complain(words: fmt::Arguments<'_>) {
    drop(std::io::stderr().write_fmt(words));
}

/// Writes a file whole or not at all: a full disk and a kill leave what was there. What is no regular file, such as a pipe, is written to,
/// and so is a file in a folder in which no other can be made.
///
/// # Errors
/// As the file system refuses.
pub fn replace(path: &Path, text: &str) -> Written<()> {
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let found = target.metadata().ok();
    let Some(name) = target.file_name().filter(|_| found.as_ref().is_none_or(Metadata::is_file)) else {
        return fs::write(path, text);
    };
    let draft = target.with_file_name(format!("{}.{}.new", name.display(), std::process::id()));
    let write = || {
        fs::write(&draft, text)?;
        found.map_or(Ok(()), |found| fs::set_permissions(&draft, found.permissions()))?;
        fs::rename(&draft, &target)
    };
    write().or_else(|error| {
        drop(fs::remove_file(&draft));
        if error.kind() == ErrorKind::PermissionDenied { fs::write(path, text) } else { Err(error) }
    })
}

/// What `work` returns, or that what it printed could not be written.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let worked = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| match panic.downcast() {
        Ok(failure) => Err(*failure),
        Err(panic) => resume_unwind(panic),
    })?;
    match std::io::stdout().flush() {
        Ok(()) => Ok(worked),
        Err(error) => Err(unwritten(&error)),
    }
}

/// Writes, on a thread of its own, what a loop says that must go on: a reader that reads nothing does not hold it up, and a disk that fills up
/// behind its first text does not end it.
pub struct Teller {
    texts: Sender<String>,
    /// Bytes that are not yet written.
    waiting: Arc<Mutex<usize>>,
    ended: Receiver<Written<()>>,
}

impl Teller {
    /// Bytes that wait for the reader before a text is refused.
    const MOST_WAITING: usize = 16 << 20;

    /// A thread that writes to `to`, which nothing else waits for.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(mut to: impl Write + Send + 'static) -> Written<Self> {
        let ((texts, coming), (end, ended)) = (channel::<String>(), channel());
        let waiting = Arc::new(Mutex::new(0));
        let written = Arc::clone(&waiting);
        let write = move || {
            let mut is_begun = false;
            let outcome = coming.iter().try_for_each(|text| {
                match to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
                    // A log that has no room any more lacks what is said meanwhile.
                    Err(error) if is_begun && error.kind() == ErrorKind::StorageFull => {}
                    outcome => outcome?,
                }
                is_begun = true;
                *lock(&written) -= text.len();
                Ok(())
            });
            // The other end is gone when nobody asks.
            drop(end.send(outcome));
        };
        std::thread::Builder::new().name("polder-teller".to_owned()).spawn(write)?;
        Ok(Self { texts, waiting, ended })
    }

    /// Says `text` after all that was said before. False if the reader is so far behind that it is refused.
    ///
    /// # Errors
    /// An earlier text could not be written.
    pub fn say(&self, text: String) -> Result<bool, Failure> {
        if let Ok(Err(error)) = self.ended.try_recv() {
            return Err(unwritten(&error));
        }
        let mut waiting = lock(&self.waiting);
        if *waiting > 0 && *waiting + text.len() > Self::MOST_WAITING {
            return Ok(false);
        }
        *waiting += text.len();
        drop(waiting);
        // A thread that has ended meanwhile says why at the next text, or at the end.
        drop(self.texts.send(text));
        Ok(true)
    }

    /// Lets what was said be written within `grace`; what is not read then is lost.
    ///
    /// # Errors
    /// A text could not be written.
    pub fn end(self, grace: Duration) -> Result<(), Failure> {
        drop(self.texts);
        match self.ended.recv_timeout(grace) {
            Ok(Err(error)) => Err(unwritten(&error)),
            Ok(Ok(())) | Err(_) => Ok(()),
        }
    }
}

fn lock(number: &Mutex<usize>) -> MutexGuard<'_, usize> {
    number.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The failure of a command whose output cannot be written.
pub fn unwritten(error: &std::io::Error) -> Failure {
    Failure(format!("cannot write to stdout: {error}"))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::io::Read;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;

    /// A folder that is gone when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("polder-front-{name}-{}", std::process::id()));
            fs::create_dir(&folder).unwrap();
            Self(folder)
        }

        fn files(&self) -> usize {
            fs::read_dir(&self.0).unwrap().count()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn a_file_is_replaced_whole_with_its_mode_and_behind_its_link() {
        let folder = Folder::new("whole");
        let (file, link) = (folder.0.join("file"), folder.0.join("link"));
        replace(&file, "one").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        symlink("file", &link).unwrap();
        replace(&link, "two").unwrap();
        let mode = file.metadata().unwrap().permissions().mode() & 0o777;
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!((&*text, mode, link.is_symlink(), folder.files()), ("two", 0o600, true, 2));
        replace(Path::new("/dev/null"), "three").unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_written_whole_stays() {
        let folder = Folder::new("stays");
        let file = folder.0.join("file");
        replace(&file, "one").unwrap();
        // In the way, as a full disk is.
        fs::create_dir(folder.0.join(format!("file.{}.new", std::process::id()))).unwrap();
        replace(&file, "two").unwrap_err();
        assert_eq!(fs::read_to_string(&file).unwrap(), "one");
        replace(&folder.0.join("none/file"), "two").unwrap_err();
        assert_eq!(folder.files(), 2);
    }

    /// Longer than any wait of a test.
    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn a_reader_that_reads_nothing_holds_nobody_up_and_then_gets_what_was_taken() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let teller = Teller::start(writer).unwrap();
        let text = "x".repeat(1 << 20);
        let mut taken = 0;
        while teller.say(text.clone()).unwrap() {
            taken += 1;
        }
        assert!(taken > 1, "what waits is more than a pipe holds");
        let read = std::thread::spawn(move || {
            let mut read = vec![];
            reader.read_to_end(&mut read).unwrap();
            read.len()
        });
        teller.end(LONG).unwrap();
        assert_eq!(read.join().unwrap(), taken * text.len());
    }

    #[test]
    fn an_end_does_not_wait_for_a_reader_that_reads_nothing() {
        let (_reader, writer) = std::io::pipe().unwrap();
        let teller = Teller::start(writer).unwrap();
        assert!(teller.say("x".repeat(1 << 20)).unwrap());
        teller.end(Duration::ZERO).unwrap();
    }

    #[test]
    fn a_disk_that_is_full_at_first_is_an_error_and_later_costs_what_was_said_meanwhile() {
        /// A file that has no room for what begins with an exclamation mark.
        struct Disk(Arc<Mutex<Vec<u8>>>);

        impl Write for Disk {
            fn write(&mut self, text: &[u8]) -> Written<usize> {
                if text.starts_with(b"!") {
                    return Err(ErrorKind::StorageFull.into());
                }
                self.0.lock().unwrap().write(text)
            }

            fn flush(&mut self) -> Written<()> {
                Ok(())
            }
        }

        for (texts, written) in
            [(["one", "!two", "three"], Ok("onethree")), (["!one", "two", "three"], Err(()))]
        {
            let file = Arc::new(Mutex::new(vec![]));
            let teller = Teller::start(Disk(Arc::clone(&file))).unwrap();
            // One that has ended says so at a later text, or at the end.
            let told = texts.map(|text| teller.say(text.to_owned()));
            let ended =
                told.into_iter().map(|said| said.map(drop)).chain([teller.end(LONG)]).find(Result::is_err);
            assert_eq!(ended.is_some(), written.is_err(), "{texts:?}");
            assert_eq!(*file.lock().unwrap(), written.unwrap_or("").as_bytes(), "{texts:?}");
        }
    }

    #[test]
    fn that_nobody_can_read_is_an_error() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let teller = Teller::start(writer).unwrap();
        assert!(teller.say("heard by nobody".to_owned()).unwrap());
        let failure = teller.end(LONG).unwrap_err();
        assert!(failure.0.starts_with("cannot write to stdout: "), "{failure}");
    }
}
