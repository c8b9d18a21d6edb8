"""Reads JSON lines that are too long for memory in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

from gptpar.errors import DataError

PART_BYTES = 1 << 20
"""Bytes of a line that are read at a time."""
MAX_OUTSIDE = 1 << 28  # bytes of a line outside its long strings, which are kept in memory

Cut = Callable[[bytes], int]  # UTF-8 -> the position where it may be divided, 0: nowhere; see Tokenizer.cutter
Values = Callable[[str, Sequence[str]], tuple[str, ...]]

# The inside of a JSON string: up to its quote, or up to an escape that the buffer does not hold whole.
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_LONGEST_ESCAPE = 12  # bytes: two \uXXXX that are one character


class Divider:
    """Divides bytes that arrive bit by bit into parts of at least PART_BYTES, at positions that ``cut`` gives."""

    def __init__(self, cut: Cut):
        self._cut = cut
        self._data = bytearray()
        self._try_at = PART_BYTES

    def add(self, data: bytes) -> bytes:
        """Add bytes; returns the next part, or nothing yet. The rest is never empty once bytes have been added."""
        self._data += data
        if len(self._data) < self._try_at:
            return b""
        at = self._cut(bytes(self._data))
        part = bytes(self._data[:at])
        del self._data[:at]
        # A text that cannot be divided is searched again only when it is twice as long.
        self._try_at = max(PART_BYTES, 2 * len(self._data))
        return part

    def rest(self) -> bytes:
        return bytes(self._data)


class LongLine:
    """One line that holds a JSON object, read without holding its long strings.

    The bytes outside long strings are kept, with "" for each long string, and parsed when the line ends. That finds
    every error that parsing the whole line would find.

    Args:
        chunks: the line's bytes, in chunks of about PART_BYTES.
        keys: the keys whose texts are read.
        cut: where a text may be divided.
        values: parses a line to the text of each key, or raises DataError.

    State: the line is what has been taken (``_consumed`` bytes), ``_buffer``, and the chunks that are not read yet.
    ``_outside`` holds the bytes taken so far but the insides of long strings; ``_long`` has a divider for each key
    whose text was a long string.
    """

    def __init__(self, chunks: Iterator[bytes], keys: Sequence[str], cut: Cut, values: Values):
        self._chunks, self._keys, self._cut, self._values = chunks, keys, cut, values
        self._buffer = b""
        self._consumed = 0  # bytes of the line before the buffer
        self._outside = bytearray()
        self._long: dict[str, Divider] = {}

    def parts(self) -> Iterator[tuple[bytes, ...]]:
        """Parts of the keys' texts in UTF-8; every text continues in the next part, until the last one.

        Raises:
            DataError: the line cannot be parsed.
        """
        while self._enter_string():
            end = self._inside()
            if self._buffer[end : end + 1] == b'"':
                self._keep(end + 1)
            else:
                yield from self._long_string()
        if self._outside.strip():  # else the line is blank
            yield self._last_part()

    def _read(self) -> bool:
        chunk = next(self._chunks, b"")
        self._buffer += chunk
        return bool(chunk)

    def _take(self, size: int) -> bytes:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        self._consumed += size
        return taken

    def _keep(self, size: int) -> None:
        self._outside += self._take(size)
        if len(self._outside) > MAX_OUTSIDE:
            raise DataError(f"more than {MAX_OUTSIDE:,} bytes of the line lie outside long strings")

    def _inside(self) -> int:
        match = _INSIDE.match(self._buffer)
        return match.end() if match else 0

    def _enter_string(self) -> bool:
        """Whether another string begins; then the buffer starts inside it and holds PART_BYTES, or the line's rest."""
        while (quote := self._buffer.find(b'"')) < 0:
            self._keep(len(self._buffer))
            if not self._read():
                return False
        self._keep(quote + 1)
        while len(self._buffer) < PART_BYTES and self._read():
            pass
        return True

    def _long_string(self) -> Iterator[tuple[bytes, ...]]:
        key = self._key()
        text = None if key is None else self._long.setdefault(key, Divider(self._cut))
        while True:
            end = self._inside()
            ended = self._buffer[end : end + 1] == b'"'
            decoded = self._decode(end, ended)
            if text is not None and (part := text.add(_utf8(decoded, key))):
                yield tuple(part if k == key else b"" for k in self._keys)
            if ended:
                return self._keep(1)
            if not self._read():  # the line ends inside the string, which parsing the kept bytes will report
                return self._keep(len(self._buffer))

    def _key(self) -> str | None:
        """The key whose value is the string that was just entered; ``None`` if it is not one of ``keys``."""
        try:
            pairs = json.loads(self._outside.decode() + '"}', object_pairs_hook=list)
        except (ValueError, RecursionError):
            return None
        return pairs[-1][0] if pairs[-1][0] in self._keys else None

    def _decode(self, end: int, ended: bool) -> str:
        """Take the inside of a string up to ``end``, or slightly less, so that no character is divided."""
        problem: ValueError | None = None
        half: tuple[int, str] | None = None
        for size in [end] if ended else range(end, max(end - _LONGEST_ESCAPE - 1, -1), -1):
            try:
                text: str = json.loads(f'"{self._buffer[:size].decode()}"')
            except ValueError as error:
                problem = problem or error
                continue
            if ended or not "\ud800" <= text[-1:] <= "\udbff":
                self._take(size)
                return text
            half = half or (size, text)  # ends with the first half of a pair: try fewer bytes
        if half:  # there is no second half
            self._take(half[0])
            return half[1]
        if isinstance(problem, UnicodeDecodeError):
            byte = problem.object[problem.start]
            raise DataError(f"byte {self._consumed + problem.start + 1} ({byte:#04x}) is not UTF-8")
        raise DataError(f"not JSON: {getattr(problem, 'msg', problem)}, in the string at byte {self._consumed + 1}")

    def _last_part(self) -> tuple[bytes, ...]:
        try:
            line = self._outside.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"byte {error.object[error.start]:#04x} is not UTF-8") from None
        try:
            texts = self._values(line, self._keys)
        except DataError as error:
            raise DataError(f"{error}, not counting its long strings" if self._long else str(error)) from None
        if self._long:
            names = [name for name, _ in json.loads(line, object_pairs_hook=list)]
            for key in self._long:
                if names.count(key) > 1:
                    raise DataError(f'the key "{key}" of a line this long must not occur twice')
        return tuple(
            self._long[key].rest() if key in self._long else text.encode()
            for key, text in zip(self._keys, texts, strict=True)
        )


def _utf8(text: str, key: str | None) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise DataError(f'the value of "{key}" holds half a character (a lone \\ud800..\\udfff)') from None
