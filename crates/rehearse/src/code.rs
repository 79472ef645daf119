//! Finds the instructions that flush a line or store around the caches in what a process has loaded.

use std::ffi::{CStr, c_int, c_void};
use std::path::Path;
use std::sync::atomic::AtomicU32;

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

/// An instruction with a trap in its place.
#[derive(Debug)]
pub(crate) struct Site {
    /// Its address.
    pub(crate) at: u64,
    pub(crate) length: u8,
    pub(crate) action: Action,
    pub(crate) operand: Address,
    /// The file that it is in, and its address there, as `objdump` and `addr2line` have it.
    pub(crate) file: &'static str,
    pub(crate) offset: u64,
    /// Where its hits are counted.
    pub(crate) record: AtomicU32,
}

/// What an instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// `clflush`, `clflushopt`.
    Flush,
    /// `clwb`.
    WriteBack,
    /// `movnti`, `movdiri`: so many bytes of a general register.
    Store { register: u8, bytes: u8 },
    /// `movntdq` and its like: so many bytes of a vector register.
    StoreVector { register: u8, bytes: u8 },
    /// `movdir64b`: 64 bytes from the operand to the address in a register.
    StoreLine { register: u8 },
}

/// Where an operand in memory lies: general registers by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) base: Option<u8>,
    pub(crate) index: Option<(u8, u64)>,
    /// With the address of the next instruction in it, where that is the base.
    pub(crate) displacement: u64,
}

/// A file that is loaded into this process.
pub(crate) struct Object {
    pub(crate) name: &'static str,
    /// What is added to the addresses of the file.
    pub(crate) bias: u64,
    /// Where its code lies, from and to.
    pub(crate) texts: Vec<(u64, u64)>,
    functions: Functions,
}

/// The beginnings of functions: instructions are told from there on. A table of `.eh_frame_hdr`, which is sorted.
#[derive(Clone, Copy)]
struct Functions {
    /// The address that the table counts from.
    header: u64,
    /// Each with its function, and where that is described.
    table: &'static [[i32; 2]],
}

impl Functions {
    const NONE: Self = Self { header: 0, table: &[] };

    /// # Safety
    /// A loaded file must have its `.eh_frame_hdr` at `header`.
    unsafe fn new(header: u64) -> Self {
        let start = header as *const u32;
        // SAFETY: the caller's; three words stand at the beginning, at a multiple of 4.
        let [encodings, count] = unsafe { [start.read(), start.add(2).read()] };
        // Version 1, and a table of signed words that count from the header: what every linker writes.
        match encodings.to_le_bytes() {
            [1, _, 0x03, 0x3b] => {
                // SAFETY: as many pairs stand behind those words.
                let table = unsafe { std::slice::from_raw_parts(start.add(3).cast(), count as usize) };
                Self { header, table }
            }
            _ => Self::NONE,
        }
    }

    /// Where the function begins that an address is in.
    fn start_of(&self, address: u64) -> Option<u64> {
        let begin = |function: &[i32; 2]| self.header.wrapping_add_signed(function[0].into());
        let behind = self.table.partition_point(|function| begin(function) <= address);
        self.table[..behind].last().map(begin)
    }
}

/// What is loaded into this process, but for the C library and this one.
///
/// The C library's own stores around the caches are ordinary stores here: no program may rest on whether memcpy has them.
pub(crate) fn objects() -> Vec<Object> {
    unsafe extern "C" fn add(info: *mut libc::dl_phdr_info, _: usize, objects: *mut c_void) -> c_int {
        // SAFETY: dl_iterate_phdr passes what `objects` gave it, and a description that is valid during the call.
        let (objects, info) = unsafe { (&mut *objects.cast::<Vec<Object>>(), &*info) };
        // SAFETY: the headers of a loaded file.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let mut object = Object { name: "", bias: info.dlpi_addr, texts: vec![], functions: Functions::NONE };
        for header in headers {
            let at = info.dlpi_addr + header.p_vaddr;
            match header.p_type {
                libc::PT_LOAD if header.p_flags & libc::PF_X != 0 => {
                    object.texts.push((at, at + header.p_filesz));
                }
                // SAFETY: the header says so of a file that is loaded.
                libc::PT_GNU_EH_FRAME => object.functions = unsafe { Functions::new(at) },
                _ => {}
            }
        }
        let own = add as *const () as u64;
        let has_own = object.texts.iter().any(|(begin, end)| (*begin..*end).contains(&own));
        // SAFETY: a string that ends with a zero.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_string_lossy();
        let name = Path::new(&*path).file_name().map_or("".into(), |name| name.to_string_lossy());
        if !has_own && !is_of_system(&name) {
            // A few bytes for each file, for as long as the process runs.
            object.name = if name.is_empty() { program() } else { name.into_owned().leak() };
            objects.push(object);
        }
        0
    }
    let mut objects = vec![];
    // SAFETY: `add` takes what is passed here, which lives as long as the call.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut objects).cast()) };
    objects
}

/// Whether a file is a part of the C library, or of the kernel. `libc-2.31.so` is its older name.
fn is_of_system(name: &str) -> bool {
    ["libc.so.", "libc-2.", "ld-linux", "linux-vdso"].iter().any(|it| name.starts_with(it))
}

fn program() -> &'static str {
    let path = std::env::current_exe().unwrap_or_default();
    path.file_name().unwrap_or_default().to_string_lossy().into_owned().leak()
}

impl Object {
    /// Its instructions that move lines.
    pub(crate) fn sites(&self) -> Vec<Site> {
        let mut sites = vec![];
        for &(begin, end) in &self.texts {
            // SAFETY: the code of a loaded file.
            let code = unsafe { std::slice::from_raw_parts(begin as *const u8, (end - begin) as usize) };
            let site = |instruction: Instruction, action| Site {
                at: instruction.ip(),
                length: instruction.len() as u8,
                action,
                operand: operand(&instruction).expect("it was found by its operand"),
                file: self.name,
                offset: instruction.ip() - self.bias,
                record: AtomicU32::new(0),
            };
            let found = instructions(code, begin, |address| self.functions.start_of(address));
            sites.extend(found.into_iter().map(|(instruction, action)| site(instruction, action)));
        }
        sites
    }
}

/// The instructions in `code`, which is loaded at `begin`, that move lines. Only functions with bytes that look like one are decoded.
fn instructions(
    code: &[u8],
    begin: u64,
    start_of: impl Fn(u64) -> Option<u64>,
) -> Vec<(Instruction, Action)> {
    let mut decoded = vec![];
    let mut decoder = Decoder::with_ip(64, code, begin, DecoderOptions::NONE);
    for index in (0..code.len()).filter(|&index| looks_like_one(code, index)) {
        let start = start_of(begin + index as u64).unwrap_or(begin).max(begin);
        if start > decoder.ip() {
            decoder.set_ip(start);
            decoder.set_position((start - begin) as usize).expect("within the code");
        }
        while decoder.position() <= index {
            let instruction = decoder.decode();
            if let (Some(action), Some(_)) = (action(&instruction), operand(&instruction)) {
                decoded.push((instruction, action));
            }
        }
    }
    decoded
}

/// Whether a byte may be the opcode of an instruction that moves lines.
fn looks_like_one(code: &[u8], index: usize) -> bool {
    let before = |count: usize| index.checked_sub(count).and_then(|at| code.get(at));
    let behind = |count: usize| code.get(index + count);
    match code[index] {
        // With a word of memory as operand.
        0xae => {
            before(1) == Some(&0x0f) && behind(1).is_some_and(|modrm| modrm >> 3 & 7 >= 6 && modrm >> 6 != 3)
        }
        0xc3 => before(1) == Some(&0x0f),
        0xf8 | 0xf9 => before(1) == Some(&0x38) && before(2) == Some(&0x0f),
        // Behind 0f, or a prefix of VEX or EVEX.
        0xe7 | 0x2b => {
            before(1) == Some(&0x0f)
                || before(2) == Some(&0xc5)
                || before(3) == Some(&0xc4)
                || before(4) == Some(&0x62)
        }
        _ => false,
    }
}

fn action(instruction: &Instruction) -> Option<Action> {
    Some(match instruction.mnemonic() {
        Mnemonic::Clflush | Mnemonic::Clflushopt => Action::Flush,
        Mnemonic::Clwb => Action::WriteBack,
        Mnemonic::Movnti | Mnemonic::Movdiri => {
            let register = instruction.op1_register();
            match general(register) {
                Some(register) => Action::Store { register, bytes: 8 },
                None => Action::Store { register: number(register, Register::EAX, 16)?, bytes: 4 },
            }
        }
        Mnemonic::Movdir64b => Action::StoreLine { register: general(instruction.op0_register())? },
        Mnemonic::Movntdq
        | Mnemonic::Movntps
        | Mnemonic::Movntpd
        | Mnemonic::Vmovntdq
        | Mnemonic::Vmovntps
        | Mnemonic::Vmovntpd => {
            let register = instruction.op1_register();
            let sets = [(Register::XMM0, 16), (Register::YMM0, 32), (Register::ZMM0, 64)];
            let vector =
                |(first, bytes)| Some(Action::StoreVector { register: number(register, first, 32)?, bytes });
            return sets.into_iter().find_map(vector);
        }
        _ => return None,
    })
}

/// Where the operand in memory lies, unless a segment or half a register says it, as no compiler has it.
fn operand(instruction: &Instruction) -> Option<Address> {
    let has_memory = [instruction.op0_kind(), instruction.op1_kind()].contains(&OpKind::Memory);
    if !has_memory || matches!(instruction.segment_prefix(), Register::FS | Register::GS) {
        return None;
    }
    let (base, index) = (instruction.memory_base(), instruction.memory_index());
    let scaled = |register| Some((general(register)?, instruction.memory_index_scale().into()));
    Some(Address {
        // The displacement has the address in it.
        base: if matches!(base, Register::RIP | Register::None) { None } else { Some(general(base)?) },
        index: if index == Register::None { None } else { Some(scaled(index)?) },
        displacement: instruction.memory_displacement64(),
    })
}

/// The number of a general register of 64 bits.
fn general(register: Register) -> Option<u8> {
    number(register, Register::RAX, 16)
}

/// The number of a register among those of a set.
fn number(register: Register, first: Register, count: usize) -> Option<u8> {
    let number = (register as usize).checked_sub(first as usize)?;
    (number < count).then_some(number as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(code: &[u8]) -> Vec<(u64, Action, Address)> {
        let found = instructions(code, 0x1000, |_| None);
        found.iter().map(|(it, action)| (it.ip(), *action, operand(it).unwrap())).collect()
    }

    const fn at(base: u8) -> Address {
        Address { base: Some(base), index: None, displacement: 0 }
    }

    #[test]
    fn each_instruction_that_moves_lines_is_found_with_its_operand() {
        #[rustfmt::skip]
        let cases: &[(&[u8], Action, Address)] = &[
            // clflush [rax]; clflushopt [rdi]; clwb [r12 + rcx*8 + 0x10]; clflush [rip + 0x100]
            (&[0x0f, 0xae, 0x38], Action::Flush, at(0)),
            (&[0x66, 0x0f, 0xae, 0x3f], Action::Flush, at(7)),
            (&[0x66, 0x41, 0x0f, 0xae, 0x74, 0xcc, 0x10], Action::WriteBack, Address { base: Some(12), index: Some((1, 8)), displacement: 0x10 }),
            (&[0x0f, 0xae, 0x3d, 0x00, 0x01, 0x00, 0x00], Action::Flush, Address { base: None, index: None, displacement: 0x1107 }),
            // movnti [rdx], rbx; movnti [rdx], ebx; movntdq [rdi], xmm9
            (&[0x48, 0x0f, 0xc3, 0x1a], Action::Store { register: 3, bytes: 8 }, at(2)),
            (&[0x0f, 0xc3, 0x1a], Action::Store { register: 3, bytes: 4 }, at(2)),
            (&[0x66, 0x44, 0x0f, 0xe7, 0x0f], Action::StoreVector { register: 9, bytes: 16 }, at(7)),
            // vmovntdq [rdi], ymm1; vmovntps [rdi], zmm17; movdir64b rax, [rcx]; movdiri [rdx], rax
            (&[0xc5, 0xfd, 0xe7, 0x0f], Action::StoreVector { register: 1, bytes: 32 }, at(7)),
            (&[0x62, 0xe1, 0x7c, 0x48, 0x2b, 0x0f], Action::StoreVector { register: 17, bytes: 64 }, at(7)),
            (&[0x66, 0x0f, 0x38, 0xf8, 0x01], Action::StoreLine { register: 0 }, at(1)),
            (&[0x48, 0x0f, 0x38, 0xf9, 0x02], Action::Store { register: 0, bytes: 8 }, at(2)),
        ];
        for (code, action, operand) in cases {
            assert_eq!(found(code), [(0x1000, *action, *operand)], "{code:02x?}");
        }
    }

    #[test]
    fn a_library_whose_name_begins_like_the_c_librarys_is_the_programs() {
        for name in ["libc.so.6", "libc-2.31.so", "ld-linux-x86-64.so.2", "linux-vdso.so.1"] {
            assert!(is_of_system(name), "{name}");
        }
        for name in ["libc-client.so.2007e", "libc.so", "libcxl.so.1", ""] {
            assert!(!is_of_system(name), "{name}");
        }
    }

    #[test]
    fn fences_and_bytes_within_other_instructions_are_none() {
        // mfence; sfence; mov eax, 0x38ae0f66; xsave [rax]
        let code = [0x0f, 0xae, 0xf0, 0x0f, 0xae, 0xf8, 0xb8, 0x66, 0x0f, 0xae, 0x38, 0x0f, 0xae, 0x20];
        assert_eq!(found(&code), []);
    }

    #[test]
    fn a_function_is_decoded_from_its_own_beginning() {
        // Half an instruction before it, which would take its first bytes: mov eax, imm32.
        let code = [0xb8, 0x0f, 0xae, 0x38];
        assert_eq!(found(&code), []);
        let found = instructions(&code, 0x1000, |address| (address > 0x1000).then_some(0x1001));
        assert_eq!(found.iter().map(|(it, _)| it.ip()).collect::<Vec<_>>(), [0x1001]);
    }
}
