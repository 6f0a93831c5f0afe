"""PTX, the assembly of GPUs, as C: a function for each kernel, with the signature of tests/fakes/cuda_fake.cc.

It knows the instructions that the compilers make of our kernels, with the meaning that NVIDIA's "PTX ISA" gives them. What it
does not know is an error that names it: so a kernel whose threads meet (shared memory, barriers, atomics, shuffles) is refused.
A register is an unsigned integer of its width, and the type of each instruction says how its bits are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PROLOGUE = r"""
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define EXPORT __attribute__((visibility("default")))
struct place { unsigned long long first, step; unsigned row; };
typedef void kernel(const void*, const struct place*);

/* The first access of a kernel that a GPU would refuse, and where memory is (nowhere: it is not checked). */
EXPORT const char* ptx_fault;
EXPORT struct { uint64_t begin, end; } ptx_memory[200];
EXPORT unsigned ptx_memories;
static int accessible(uint64_t at, unsigned bytes) {
  if (at % bytes) { ptx_fault = "a misaligned address"; return 0; }
  if (!ptx_memories) return 1;
  for (unsigned i = 0; i < ptx_memories; ++i)
    if (at >= ptx_memory[i].begin && at + bytes <= ptx_memory[i].end) return 1;
  ptx_fault = "an address outside of what the kernel was given";
  return 0;
}
static int given(uint64_t at, unsigned all, unsigned bytes) {
  if (at <= all - bytes) return 1;
  ptx_fault = "beyond the arguments";
  return 0;
}
#define BYTES(at) ((unsigned char*)(uintptr_t)(at))

static inline float from_f32(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
static inline double from_f64(uint64_t bits) { double v; memcpy(&v, &bits, 8); return v; }
/* Of 32 bits a GPU's NaN is this one; of 64 bits nothing is said, so it is none that a kernel might hope for. */
static inline uint32_t to_f32(float v) { uint32_t b; memcpy(&b, &v, 4); return v == v ? b : 0x7fffffffu; }
static inline uint64_t to_f64(double v) { uint64_t b; memcpy(&b, &v, 8); return v == v ? b : 0x7ff8000000000038u; }
static inline float from_f16(uint16_t bits) { _Float16 v; memcpy(&v, &bits, 2); return (float)v; }
static inline uint16_t to_f16(float from) {
  _Float16 v = (_Float16)from; uint16_t b; memcpy(&b, &v, 2); return from == from ? b : 0x7fff; }
static inline int64_t truncated(double v) {
  return v != v ? INT64_MIN : v >= 0x1p63 ? INT64_MAX : v <= -0x1p63 ? INT64_MIN : (int64_t)v; }
static inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selectors) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t made = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t selector = selectors >> 4 * i, byte = bytes >> 8 * (selector & 7) & 255;
    made |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return made;
}

/* A launch. Nothing is promised about the order of threads, so it is none that a kernel might hope for. */
EXPORT void ptx_launch(kernel* run, const void* arguments, unsigned blocks, unsigned rows) {
  const uint64_t step = 256ull * blocks, threads = step * rows;
  for (uint64_t i = 0; i < threads; ++i) {
    const uint64_t thread = (i * 1000003 + threads / 2) % threads;
    run(arguments, &(struct place){thread % step, step, (unsigned)(thread / step)});
  }
}
"""
SPECIAL = {
    "%tid.x": "(uint32_t)(here->first % 256)",
    "%ctaid.x": "(uint32_t)(here->first / 256)",
    "%ntid.x": "256u",
    "%nctaid.x": "(uint32_t)(here->step / 256)",
    "%ctaid.y": "here->row",
}


class Unknown(Exception):
    """Something that this translator does not know, in its own words."""


def width(kind: str) -> int:
    return int(kind[1:])


def integer_type(kind: str) -> str:
    return f"{'int' if kind[0] == 's' else 'uint'}{width(kind)}_t"


def register_type(kind: str) -> str:
    return "_Bool" if kind == "pred" else f"uint{width(kind)}_t"


def name(symbol: str) -> str:
    return re.sub(r"\W", "_", symbol)


class Operands:
    """Of one instruction: `o[1, "s32"]` is the second one as C, read as that type."""

    def __init__(self, text: str, symbols: dict[str, str]) -> None:
        self.texts = [one.strip() for one in re.findall(r"(?:\{[^}]*\}|[^,])+", text)]
        self._symbols = symbols

    def __getitem__(self, key: tuple[int, str]) -> str:
        return self.read(self.texts[key[0]], key[1])

    def read(self, text: str, kind: str) -> str:
        value = self._value(text, kind)
        if kind in ("f16", "f32", "f64"):
            return f"from_{kind}({value})"
        if kind == "pred":
            return value
        return f"({integer_type(kind)})({value})"

    def _value(self, text: str, kind: str) -> str:
        if text.startswith("!"):
            return f"!{self._value(text[1:], kind)}"
        if text in SPECIAL:
            return SPECIAL[text]
        if text.startswith("%"):
            return self.register(text)
        if found := re.fullmatch(r"0[fd]([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", text):
            return f"0x{found[1]}ull"
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+U", text):
            return f"{int(text.rstrip('U'), 0) % (1 << 64)}ull"
        if text in self._symbols:
            return self._symbols[text]
        raise Unknown(f"operand {text}")

    def register(self, text: str) -> str:
        if re.fullmatch(r"%[a-z]+\d+", text):
            return text[1:]
        if self._symbols.get(text) == text:  # of a block, with a name
            return text
        raise Unknown(f"register {text}")

    def assigned(self, kind: str, value: str) -> str:
        """The first operand's. A narrow result is extended into a wider register, by its sign if its type has one."""
        if kind in ("f16", "f32", "f64"):
            return f"{self.register(self.texts[0])} = to_{kind}({value});"
        if kind == "pred":
            return f"{self.register(self.texts[0])} = {value};"
        return f"{self.register(self.texts[0])} = ({integer_type(kind)})({value});"

    def address(self, index: int) -> str:
        found = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", self.texts[index])
        if found is None:
            raise Unknown(f"address {self.texts[index]}")
        return f"{self._value(found[1], 'b64')} + ({found[2] or 0}ll)"

    def vector(self, index: int) -> list[str]:
        return [one.strip() for one in self.texts[index].strip("{}").split(",")]


def move(o: Operands, t: str) -> str:
    """Also of a register into the parts of which it consists, and back."""
    if o.texts[0].startswith("{"):
        parts = o.vector(0)
        each = width(t) // len(parts)
        taken = [f"{o.register(one)} = whole >> {each * i};" for i, one in enumerate(parts) if one != "_"]
        return f"{{ const {register_type(t)} whole = {o[1, t]}; {' '.join(taken)} }}"
    if o.texts[1].startswith("{"):
        parts = o.vector(1)
        each = width(t) // len(parts)
        given = (f"(uint64_t){o.read(one, f'b{each}')} << {each * i}" for i, one in enumerate(parts))
        return o.assigned(t, " | ".join(given))
    kind = t if t == "pred" else f"b{width(t)}"
    return o.assigned(kind, o[1, kind])


def memory(o: Operands, loads: bool, space: str, count: int, t: str) -> str:
    each, at = width(t) // 8, 1 if loads else 0
    registers = o.vector(1 - at)
    if len(registers) != count:
        raise Unknown(f"{len(registers)} operands of {count}")
    kind, moves = integer_type(t), []
    for i, one in enumerate(registers):
        there = f"BYTES(at + {each * i})"
        if loads:
            moves.append(f"{{ {kind} v; memcpy(&v, {there}, {each}); {o.register(one)} = v; }}")
        else:
            moves.append(f"{{ {kind} v = {o.read(one, f'b{width(t)}')}; memcpy({there}, &v, {each}); }}")
    check = f"accessible(at, {each * count})"
    if space == "param":  # memory of this function, or of its kernel's launch
        check = f"given(at - (uintptr_t)arguments, all_bytes, {each * count})" if "%" in o.texts[at] else "1"
    return f"{{ const uint64_t at = {o.address(at)}; if ({check}) {{ {' '.join(moves)} }} }}"


def shift(o: Operands, right: bool, t: str) -> str:
    """Bits beyond the width shift everything out."""
    bits, by = width(t), o[2, "u32"]
    if not right:
        return o.assigned(t, f"{by} < {bits} ? {o[1, t]} << {by} : 0")
    last = f"{o[1, t]} >> {bits - 1}" if t[0] == "s" else "0"
    return o.assigned(t, f"{by} < {bits} ? {o[1, t]} >> {by} : {last}")


def bit_field(o: Operands, t: str) -> str:
    """Of a place and length that are known and lie within the register."""
    at, length = int(o.texts[2]), int(o.texts[3])
    if not (at >= 0 and length > 0 and at + length <= 32):
        raise Unknown(f"bits {at} to {at + length}")
    value = f"(uint32_t)({o[1, 'u32']} << {32 - at - length})"
    return o.assigned(t, f"{'(int32_t)' if t == 's32' else ''}{value} >> {32 - length}")


def quotient(o: Operands, t: str) -> str:
    overflows = "b == -1 ? 0 - (uint64_t)a : " if t[0] == "s" else ""
    kind = integer_type(t)
    result = o.assigned(t, f"b == 0 ? ({kind})-1 : {overflows}a / b")
    return f"{{ const {kind} a = {o[1, t]}, b = {o[2, t]}; {result} }}"


def call(text: str, functions: dict[str, str]) -> str:
    found = re.fullmatch(r"\((\w+)\),\s*(\w+),\s*\(([\w\s,]*)\)", text)
    if found is None or found[2] not in functions:
        raise Unknown(f"call {text}")
    return f"{found[1]} = {functions[found[2]]}({found[3]});"


INTEGER = {"add": "+", "sub": "-", "mul.lo": "*", "and": "&", "or": "|", "xor": "^"}
FLOAT = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def compare(o: Operands, how: str, t: str) -> str:
    a, b = o[1, t], o[2, t]
    unordered = f"(isnan({a}) || isnan({b}))" if t[0] == "f" else "0"
    if how in ("nan", "num"):
        truth = unordered if how == "nan" else f"!{unordered}"
    elif how in COMPARED:  # of floats: false where one is NaN, which C says of all of these but !=
        truth = f"{a} {COMPARED[how]} {b}" + (f" && !{unordered}" if how == "ne" else "")
    else:
        truth = f"{unordered} || {a} {COMPARED[how[:2]]} {b}"
    return o.assigned("pred", truth)


def integer(o: Operands, op: str, t: str) -> str:
    """Of 64 bits and unsigned, since that wraps in C; what is kept of it is the same with a sign."""
    return o.assigned(t, f"(uint64_t){o[1, t]} {INTEGER[op]} (uint64_t){o[2, t]}")


# An instruction's whole name, all modifiers included, and the C for its operands.
Rule = Callable[..., str]
RULES: list[tuple[str, Rule]] = [
    (r"mov\.(pred|[bufs]\d+)", move),
    (r"cvta\.to\.global\.(u64)", lambda o, t: o.assigned(t, o[1, t])),
    (r"(ld|st)(?:\.(global|param))?(?:\.v(\d))?\.([usbf]\d+)", lambda o, op, space, count, t: memory(o, op == "ld", space, int(count or 1), t)),
    (r"(add|sub|mul\.lo|and|or|xor)\.([usb](?:16|32|64))", integer),
    (r"(and|or|xor)\.(pred)", lambda o, op, t: o.assigned(t, f"{o[1, t]} {INTEGER[op]} {o[2, t]}")),
    (r"(add|sub|mul|div)\.rn\.(f32|f64)", lambda o, op, t: o.assigned(t, f"{o[1, t]} {FLOAT[op]} {o[2, t]}")),
    (r"mad\.lo\.([us](?:32|64))", lambda o, t: o.assigned(t, f"(uint64_t){o[1, t]} * (uint64_t){o[2, t]} + (uint64_t){o[3, t]}")),
    (r"mul\.wide\.([us])32", lambda o, s: o.assigned(f"{s}64", f"({'int' if s == 's' else 'uint'}64_t){o[1, f'{s}32']} * {o[2, f'{s}32']}")),
    (r"div\.([us](?:32|64))", quotient),
    (r"(min|max)\.([us](?:32|64))", lambda o, op, t: o.assigned(t, f"{o[1, t]} {'<' if op == 'min' else '>'} {o[2, t]} ? {o[1, t]} : {o[2, t]}")),
    (r"neg\.(s32|s64)", lambda o, t: o.assigned(t, f"0 - (uint64_t){o[1, t]}")),
    (r"not\.(pred)", lambda o, t: o.assigned(t, f"!{o[1, t]}")),
    (r"shl\.(b\d+)", lambda o, t: shift(o, False, t)),
    (r"shr\.([us]\d+)", lambda o, t: shift(o, True, t)),
    (r"bfe\.([us]32)", bit_field),
    (r"prmt\.(b32)", lambda o, t: o.assigned(t, f"permuted({o[1, t]}, {o[2, t]}, {o[3, t]})")),
    (r"selp\.([usbf]\d+)", lambda o, t: o.assigned(f"b{width(t)}", f"{o[3, 'pred']} ? {o[1, f'b{width(t)}']} : {o[2, f'b{width(t)}']}")),
    (r"setp\.(eq|ne|lt|le|gt|ge)\.([usb]\d+)", compare),
    (r"setp\.(num|nan|(?:eq|ne|lt|le|gt|ge)u?)\.(f32|f64)", compare),
    (r"cvt\.([us]\d+)\.([us]\d+)", lambda o, to, t: o.assigned(to, o[1, t])),
    (r"cvt\.rn\.(f32|f64)\.([us]\d+|f64)", lambda o, to, t: o.assigned(to, f"({'float' if to == 'f32' else 'double'}){o[1, t]}")),
    (r"cvt\.(f32)\.(f16)", lambda o, to, t: o.assigned(to, o[1, t])),
    (r"cvt\.(f64)\.(f32)", lambda o, to, t: o.assigned(to, o[1, t])),
    (r"cvt\.rn\.(f16)\.(f32)", lambda o, to, t: o.assigned(to, o[1, t])),
    (r"cvt\.rzi\.(s64)\.(f64)", lambda o, to, t: o.assigned(to, f"truncated({o[1, t]})")),
]  # fmt: skip


def rule_of(opcode: str) -> Callable[[Operands], str]:
    for pattern, rule in RULES:
        if found := re.fullmatch(pattern, opcode):
            return lambda o: rule(o, *found.groups())
    raise Unknown(f"instruction {opcode}")


# A label, a brace of a block, or what ends with a semicolon: there a brace holds a vector.
TOKEN = re.compile(r"\s*(?:([$\w]+):|([{}])|((?:[^;{}]|\{[^{};]*\})+);)")


class Function:
    """One function's body as C. `symbols`: its parameters, as their addresses; `result`: what it returns."""

    def __init__(self, symbols: dict[str, str], functions: dict[str, str], result: str = "") -> None:
        self.symbols, self.functions, self.result = symbols, functions, result
        self._rules: dict[str, Callable[[Operands], str]] = {}

    def lines(self, body: str) -> Iterator[str]:
        at = 0
        while at < len(body.rstrip()):
            token = TOKEN.match(body, at)
            if token is None:
                raise Unknown(body[at : at + 60].strip())
            label, brace, statement = token.groups()
            at = token.end()
            try:
                yield f"{name(label)}:;" if label else brace or self.statement(" ".join(statement.split()))
            except (Unknown, IndexError, ValueError, KeyError) as error:
                raise Unknown(f"{error} in `{(statement or '').strip()}`") from None

    def statement(self, text: str) -> str:
        if text == '.pragma "nounroll"':
            return ""
        if found := re.fullmatch(r"\.reg \.(\w+) %(\w+)<(\d+)>", text):
            ones = (f"{found[2]}{i} = 0" for i in range(int(found[3])))
            return f"{register_type(found[1])} {', '.join(ones)};"
        if found := re.fullmatch(r"\.(reg|param) \.(b\d+) (\w+)", text):
            of, kind, symbol = found.groups()
            self.symbols[symbol] = symbol if of == "reg" else f"(uint64_t)(uintptr_t)&{symbol}"
            return f"{register_type(kind)} {symbol} = 0;"
        found = re.fullmatch(r"(?:@(!?)%(p\d+) )?([a-z][\w.]*) ?(.*)", text)
        if found is None:
            raise Unknown("statement")
        unless, guard, opcode, rest = found.groups()
        made = self.instruction(opcode, rest)
        return f"if ({unless}{guard}) {{ {made} }}" if guard else made

    def instruction(self, opcode: str, rest: str) -> str:
        if opcode == "ret":
            return f"return {self.result};"
        if opcode in ("bra", "bra.uni"):
            return f"goto {name(rest)};"
        if opcode == "call.uni":
            return call(rest, self.functions)
        if opcode not in self._rules:
            self._rules[opcode] = rule_of(opcode)
        return self._rules[opcode](Operands(rest, self.symbols))


HEADER = re.compile(
    r"\s*(?:\.version [\d.]+|\.target sm_\d+|\.address_size 64|\.global \.align \d+ \.\w+ \w+(?: = \d+)?;)(?=\s)"
)
ENTRY = re.compile(
    r"\s*\.visible \.entry (\w+)\(\s*\.param \.align 8 \.b8 (\w+)\[(\d+)\]\s*\)\s*\.maxntid 256(?:, 1, 1)?\s*\{"
)
FUNCTION = re.compile(
    r"\s*\.func +\(\.param \.b64 (\w+)\) (\w+)\s*\(((?:\s*\.param \.b64 \w+,?)*)\s*\)\s*([;{])"
)


def end_of(text: str, at: int) -> int:
    """Behind the brace that closes the one before `at`."""
    depth = 1
    while depth:
        at = re.compile(r"[{}]").search(text, at).end()  # type: ignore[union-attr]
        depth += 1 if text[at - 1] == "{" else -1
    return at


def translated(text: str) -> str:
    """The C source of all kernels of a module, the same for texts that differ in their headers only."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    functions: dict[str, str] = {}
    declared, defined = [], []
    at = 0
    while at < len(text.rstrip()):
        if found := HEADER.match(text, at):
            at = found.end()
        elif found := ENTRY.match(text, at):
            at = end_of(text, found.end())
            kernel, parameter, size = found.groups()
            body = Function({parameter: "(uint64_t)(uintptr_t)arguments"}, functions).lines(
                text[found.end() : at - 1]
            )
            defined.append(f"EXPORT const unsigned {kernel}_bytes = {size};")
            defined.append(f"EXPORT void {kernel}(const void* arguments, const struct place* here) {{")
            defined.append(f"enum {{ all_bytes = {size} }};")
            defined += [*body, "}"]
        elif found := FUNCTION.match(text, at):
            at = found.end()
            result, symbol, parameters, ends = found.groups()
            if symbol not in functions:
                functions[symbol] = f"function_{len(functions)}"
            names = re.findall(r"\.b64 (\w+)", parameters)
            short = {each: f"p{i}_" for i, each in enumerate(names)}
            head = f"static uint64_t {functions[symbol]}({', '.join(f'uint64_t {each}' for each in short.values())})"
            declared.append(f"{head};")
            if ends == "{":
                at = end_of(text, at)
                symbols = {
                    each: f"(uint64_t)(uintptr_t)&{at_c}"
                    for each, at_c in {**short, result: "result"}.items()
                }
                body = Function(symbols, functions, "result").lines(text[found.end() : at - 1])
                defined += [head + " {", "uint64_t result = 0;", *body, "}"]
        else:
            raise Unknown(f"at the top: {text[at : at + 60].strip()}")
    return "\n".join([PROLOGUE, *declared, *defined, ""])
