"""What a cubin contains, read from its bytes: entries and parameters, module state, tensor-core instructions. Pure.

A cubin is an ELF64 file (System V ABI; NVIDIA's sections are described in "CUDA Binary Utilities"). Tensor-core
instructions are decoded from the machine code of compute capability 9.0 rather than printed by cuobjdump: that costs
0.3 s a cubin, half a compile, and is not on every GPU host. The decoding was derived from cuobjdump's output for every
``mma`` and ``wgmma`` form that ptxas accepts, and a test compares the two.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Bumped whenever the same cubin or compiler log would be read differently, so that cached builds are made again.
ANALYSIS_VERSION = 2

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA, _REL = struct.Struct("<QQq"), struct.Struct("<QQ")
_SHT_SYMTAB, _SHT_RELA, _SHT_NOBITS, _SHT_REL = 2, 4, 8, 9
_STT_OBJECT, _STT_FUNC, _STT_SECTION = 1, 2, 3
_STB_WEAK = 2
_SHN_UNDEF = 0
_STO_CUDA_ENTRY = 0x10
#: Attributes of .nv.info.<entry> (cuobjdump -elf names them).
_EIATTR_KPARAM_INFO, _EIFMT_SVAL = 0x17, 0x04


class CubinError(ValueError):
    """The bytes are not a cubin."""


@dataclass(frozen=True)
class Cubin:
    """``entries``: parameter sizes in bytes, in order, by kernel name; None where the cubin does not state them.
    ``mutable_globals``: variables in writable module memory that the code can reach. ``unresolved``: functions that
    the driver would have to supply (printf, malloc, assert). ``constant_address_taken``: the address of a
    ``__constant__`` variable is used as a pointer, through which it could be written. ``mma``: tensor-core
    instructions and how often each occurs."""

    entries: Mapping[str, tuple[int, ...] | None]
    mutable_globals: tuple[str, ...]
    unresolved: tuple[str, ...]
    constant_address_taken: bool
    mma: Mapping[str, int]


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: memoryview
    link: int
    info: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    kind: int
    bind: int
    other: int
    section: int


def read_cubin(data: bytes) -> Cubin:
    """Everything this module knows about a cubin. Raises CubinError on bytes that are not one."""
    try:
        sections, symbols = _read_elf(data)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise CubinError(f"not a readable cubin: {error}") from error
    params = {s.name.removeprefix(".nv.info."): _parameters(s.data) for s in sections if s.name.startswith(".nv.info.")}
    entries = [s.name for s in symbols if s.kind == _STT_FUNC and s.other & _STO_CUDA_ENTRY and s.section != _SHN_UNDEF]
    code = [s.data for s in sections if s.name.startswith(".text")]
    has_constants = any(s.name == ".nv.constant3" for s in sections)
    mma: Counter[str] = Counter()
    for text in code:
        mma.update(tensor_core_instructions(text))
    return Cubin(
        entries={name: params.get(name) for name in sorted(entries)},
        mutable_globals=_reachable_globals(sections, symbols, code),
        # Weak objects are the toolkit's own bookkeeping (.nv.reservedSmem.*) and resolve to nothing.
        unresolved=tuple(s.name for s in symbols if s.section == _SHN_UNDEF and s.name and s.bind != _STB_WEAK),
        constant_address_taken=has_constants and _takes_constant_address(code),
        mma=dict(sorted(mma.items())),
    )


_WRITABLE = frozenset((".nv.global", ".nv.global.init"))
_ADDRESS_TABLE = ".nv.constant4"


def _reachable_globals(sections: list[_Section], symbols: list[_Symbol], code: list[memoryview]) -> tuple[str, ...]:
    """Variables in writable memory whose address the code reads.

    The C++ library leaves a byte of it for each of its function objects (cuda::std::begin, cute::_), so being there
    proves nothing. Every variable has a slot in an address table, constant bank 4; code that uses it reads the slot.
    """
    slots, reached = _relocations(sections)
    read, indexed = _constant_reads(code, bank=4)
    reached |= {symbol for at, symbol in slots.items() if indexed or at // 8 in read}
    writable = {i for i, section in enumerate(sections) if section.name in _WRITABLE}
    whole = {symbols[i].section for i in reached if symbols[i].kind == _STT_SECTION} & writable
    return tuple(
        symbol.name
        for i, symbol in enumerate(symbols)
        if symbol.kind == _STT_OBJECT and symbol.section in writable and (i in reached or symbol.section in whole)
    )


def _relocations(sections: list[_Section]) -> tuple[dict[int, int], set[int]]:
    """(symbol by offset in the address table, symbols that code or data refer to directly)."""
    slots: dict[int, int] = {}
    direct: set[int] = set()
    for section in sections:
        form = {_SHT_RELA: _RELA, _SHT_REL: _REL}.get(section.kind)
        if form is None:
            continue
        target = sections[section.info].name
        for entry in form.iter_unpack(section.data):
            if target.startswith(_ADDRESS_TABLE):
                slots[entry[0]] = entry[1] >> 32
            elif not target.startswith((".debug", ".nv.info", ".nv.callgraph")):
                direct.add(entry[1] >> 32)
    return slots, direct


def _read_elf(data: bytes) -> tuple[list[_Section], list[_Symbol]]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF64 header")
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [_SECTION.unpack_from(data, table + i * entry_size) for i in range(count)]
    view = memoryview(data)

    def content(header: tuple[int, ...]) -> memoryview:
        if header[1] == _SHT_NOBITS:
            return view[:0]
        if header[4] + header[5] > len(data):
            raise ValueError("a section lies outside the file")
        return view[header[4] : header[4] + header[5]]

    def text(table_: memoryview, at: int) -> str:
        return bytes(table_[at:]).split(b"\0", 1)[0].decode()

    names = content(headers[names_index])
    sections = [_Section(text(names, h[0]), h[1], content(h), h[6], h[7]) for h in headers]
    symbols = []
    for section in sections:
        if section.kind != _SHT_SYMTAB:
            continue
        strings = content(headers[section.link])
        for at in range(0, len(section.data), _SYMBOL.size):
            name, info, other, index, _, _ = _SYMBOL.unpack_from(section.data, at)
            symbols.append(_Symbol(text(strings, name), info & 15, info >> 4, other, index))
    return sections, symbols


def _parameters(info: memoryview) -> tuple[int, ...] | None:
    """Parameter sizes from a .nv.info section: records of (format, attribute, value or size of payload)."""
    sizes: dict[int, int] = {}
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _EIFMT_SVAL:
            continue
        if attribute == _EIATTR_KPARAM_INFO and value == 12:
            _, ordinal, _, packed = struct.unpack_from("<IHHI", info, at)
            sizes[ordinal] = packed >> 18
        at += value
    return tuple(sizes[i] for i in range(len(sizes))) if sizes and set(sizes) == set(range(len(sizes))) else None


# --- machine code of compute capability 9.0 ------------------------------------------------------------------------
# An instruction is 16 bytes; its opcode is the low 12 bits. Fields below are bit positions in the two 64-bit words.

_LDC, _RZ = 0xB82, 0xFF
_HMMA, _IMMA, _BMMA, _DMMA = 0x23C, 0x237, 0x23D, 0x23F
#: wgmma with A from shared memory, and from registers.
_GMMA = {0x9F0: "HGMMA", 0xDF0: "HGMMA", 0x9F3: "QGMMA", 0xDF3: "QGMMA"} | {
    code: name for name, codes in (("IGMMA", (0x9F1, 0xDF1)), ("BGMMA", (0x9F2, 0xDF2))) for code in codes
}
_OTHER = {_IMMA: "IMMA", _BMMA: "BMMA", _DMMA: "DMMA"}
_INPUT_TYPES = {0: "", 1: ".BF16", 2: ".TF32", 3: ".?"}


def tensor_core_instructions(code: bytes | memoryview) -> Counter[str]:
    """Mnemonics as cuobjdump writes them up to the accumulator and input type: ``HMMA.16816.F32``,
    ``HGMMA.64x256x16.F32.BF16``; families without a floating-point accumulator by their bare name (``IMMA``)."""
    found: Counter[str] = Counter()
    for low, high in struct.iter_unpack("<QQ", code[: len(code) // 16 * 16]):
        opcode = low & 0xFFF
        if opcode == _HMMA:
            found[_hmma(high)] += 1
        elif opcode in _GMMA:
            found[_gmma(_GMMA[opcode], low, high)] += 1
        elif opcode in _OTHER:
            found[_OTHER[opcode]] += 1
    return found


def _hmma(high: int) -> str:
    sparse, accumulator = bool(high & 0x200), ".F32" if high & 0x1000 else ".F16"
    shape = {0: "1688", 1: "16816", 8: "1684", 9: "16832"}.get(high >> 11 & 0x9, "?")
    return f"HMMA{'.SP' if sparse else ''}.{shape}{accumulator}{_INPUT_TYPES[high >> 18 & 3]}"


def _gmma(name: str, low: int, high: int) -> str:
    if name not in ("HGMMA", "QGMMA"):
        return name
    sparse, accumulator = bool(low >> 59 & 1), ".F32" if high & 0x800 else ".F16"
    inputs = _INPUT_TYPES[high >> 12 & 3] if name == "HGMMA" else ""
    k = (32 if name == "QGMMA" else 8 if inputs == ".TF32" else 16) * (2 if sparse else 1)
    return f"{name}{'.SP' if sparse else ''}.64x{((low >> 53 & 0x1F) + 1) * 8}x{k}{accumulator}{inputs}"


def fp16_accumulators(mma: Mapping[str, int]) -> tuple[str, ...]:
    """The instructions among ``mma`` that accumulate in FP16."""
    return tuple(name for name in mma if ".F16" in name)


def other_inputs(mma: Mapping[str, int]) -> tuple[str, ...]:
    """The instructions among ``mma`` whose inputs are not FP16: FP8, integers, bits, BF16, TF32. FP64 (DMMA) takes more
    than FP16 has, so it loses nothing."""
    fp16 = [name for name in mma if name.startswith(("HMMA.", "HGMMA.")) and name.endswith((".F32", ".F16"))]
    return tuple(name for name in mma if name != "DMMA" and name not in fp16)


def _constant_reads(code: Iterable[bytes | memoryview], bank: int) -> tuple[set[int], bool]:
    """Which 8-byte words of a constant bank instructions name, and whether one indexes the bank by a register."""
    words: set[int] = set()
    indexed = False
    for text in code:
        for low, _ in struct.iter_unpack("<QQ", text[: len(text) // 16 * 16]):
            # Operand form 3, 5 or 7: a constant operand, its byte offset in bits 38-53 and its bank in bits 54-58.
            if low >> 9 & 7 in (3, 5, 7) and low >> 54 & 0x1F == bank:
                words.add((low >> 38 & 0xFFFF) // 8)
                indexed |= low & 0xFFF == _LDC and low >> 24 & 0xFF != _RZ
    return words, indexed


def _takes_constant_address(code: Iterable[bytes | memoryview]) -> bool:
    """Whether code reads the base address of the constant bank, which the driver keeps at c[0x0][0xd0].

    Plain reads of a ``__constant__`` variable name its bank instead (c[0x3][…]); indexed reads of bank 0 are those of
    kernel parameters.
    """
    return 0xD0 // 8 in _constant_reads(code, bank=0)[0]


# --- identity and the compiler's report ----------------------------------------------------------------------------

_MODULE_ID = re.compile(rb"(_INTERNAL_|_GLOBAL__N__)([0-9a-f]{8})(?=_)")


def without_paths(data: bytes) -> bytes:
    """The same cubin wherever it was compiled: nvcc names internal functions after a hash of the source's path."""
    return _MODULE_ID.sub(lambda m: m.group(1) + b"0" * 8, data)


@dataclass(frozen=True)
class Usage:
    """What ptxas reports of one function. ``registers`` is None for functions that are no entries."""

    registers: int | None
    smem_static_bytes: int
    spill_bytes: int


_PTXAS = re.compile(
    r"Compiling entry function '(?P<entry>[^']+)'"
    r"|Function properties for (?P<function>\S+)"
    r"|(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"|Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)


def ptxas_usage(log: str) -> dict[str, Usage]:
    """Registers, static shared memory and spills (stores + loads, bytes) by function, from ``ptxas -v``."""
    spills: dict[str, int] = {}
    entries: dict[str, tuple[int, int]] = {}
    entry = function = ""
    for match in _PTXAS.finditer(log):
        if match["entry"]:
            entry = function = match["entry"]
        elif match["function"]:
            function = match["function"]
        elif match["stores"]:
            spills[function] = int(match["stores"]) + int(match["loads"])
        else:
            smem = re.search(r"(\d+) bytes smem", match["rest"])
            entries[entry] = int(match["registers"]), int(smem.group(1)) if smem else 0
    return {
        name: Usage(entries[name][0] if name in entries else None, entries.get(name, (0, 0))[1], spills.get(name, 0))
        for name in sorted({*spills, *entries})
    }


def ptxas_warnings(log: str) -> tuple[str, ...]:
    """Lines that ptxas numbers (``(C7510) …``) or calls a warning, and the compiler's own warnings, once each."""
    lines = (line.strip() for line in log.splitlines())
    found = (line for line in lines if re.search(r"\(C\d{4}\)|\bwarning\b", line, re.IGNORECASE))
    return tuple(dict.fromkeys(found))


def disqualifying(warnings: tuple[str, ...]) -> str | None:
    """The first warning that rejects a build: setmaxnreg ignored (C7508), wgmma serialised (C7510, C7511, C7512)."""
    return next((w for w in warnings if re.search(r"\(C75(08|10|11|12)\)", w)), None)
