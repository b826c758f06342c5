"""Whether kernels can be compiled and called on this machine, as far as that shows without running one."""

import platform
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from cleanba.errors import said

# Where a field is in XLA's structures, in words of eight bytes.
FRAME = {"extension": 1, "api": 2, "context": 3, "arguments": 9, "results": 14, "attributes": 20, "future": 21}
BUFFER = {"data": 3, "dims": 5}
SCALAR_VALUE = 1  # an attribute's word that points to its value
API = {"schedule": 17, "create_future": 19, "set_available": 20}
METADATA = 3  # an extension's word that points to metadata
EXTENSION_KIND = 2  # where an extension says its kind, in words of four bytes; 1 stands for metadata
MAJOR, MINOR = 6, 7  # where metadata says the version, in words of four bytes
VERSION = (0, 3)  # of the interface that this was written for

# The same as C's header has it: structure, path of fields, place in bytes.
PLACES = {
    "XLA_FFI_CallFrame": {
        "extension_start": 8 * FRAME["extension"],
        "api": 8 * FRAME["api"],
        "ctx": 8 * FRAME["context"],
        "args.size": 8 * (FRAME["arguments"] - 2),
        "args.args": 8 * FRAME["arguments"],
        "rets.rets": 8 * FRAME["results"],
        "attrs.size": 8 * (FRAME["attributes"] - 3),
        "attrs.attrs": 8 * FRAME["attributes"],
        "future": 8 * FRAME["future"],
    },
    "XLA_FFI_Buffer": {"data": 8 * BUFFER["data"], "dims": 8 * BUFFER["dims"]},
    "XLA_FFI_Scalar": {"value": 8 * SCALAR_VALUE},
    "XLA_FFI_Api": {
        "XLA_FFI_ThreadPool_Schedule": 8 * API["schedule"],
        "XLA_FFI_Future_Create": 8 * API["create_future"],
        "XLA_FFI_Future_SetAvailable": 8 * API["set_available"],
    },
    "XLA_FFI_Metadata_Extension": {"extension_base.type": 4 * EXTENSION_KIND, "metadata": 8 * METADATA},
    "XLA_FFI_Metadata": {"api_version.major_version": 4 * MAJOR, "api_version.minor_version": 4 * MINOR},
    "XLA_FFI_ThreadPool_Schedule_Args": {"ctx": 16, "task": 24, "data": 32},
    "XLA_FFI_Future_Create_Args": {"future": 16},
    "XLA_FFI_Future_SetAvailable_Args": {"future": 16},
}


@cache
def obstacle() -> str:
    """Why kernels cannot be used on this machine, as the second half of a sentence; "" if nothing is known.

    Touches no device.
    """
    system, processor = platform.system(), platform.machine()
    if (system, processor) != ("Linux", "x86_64"):
        return f"they have been tested on Linux with x86-64 processors only, and this is {system} on {processor}"
    try:
        features = host_features()
    except ImportError as error:
        return f"the package llvmlite does not load ({said(error)})"
    except Exception as error:  # a library that is damaged, or for another system, may fail in many ways
        return f"the package llvmlite is broken ({type(error).__name__}: {said(error)})"
    if missing := [name for name in ("avx2", "fma") if not features.get(name)]:
        return f"this processor has no {' and no '.join(missing).upper()}"
    return interface_obstacle()


def host_features() -> Any:
    """The processor's instruction sets by LLVM's names, each with whether it has it."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_features()


def interface_obstacle() -> str:
    """Why the installed XLA cannot call kernels, as the second half of a sentence; "" if it can.

    Kernels read XLA's call frame by hand-written offsets.  jaxlib brings the C header that declares the frame, so any
    version whose header puts the fields at these offsets will do.
    """
    jaxlib = f"jaxlib {version('jaxlib')}"
    try:
        header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    except (OSError, AttributeError) as error:
        return f"{jaxlib} does not say how it calls foreign functions ({said(error)})"
    return "" if declares(header) else f"{jaxlib} calls foreign functions in a way that they do not support yet"


def declares(header: str) -> bool:
    """Whether a version of XLA's header c_api.h puts all that kernels read and write where they look for it."""
    try:
        major, minor = (int(_found(rf"#define XLA_FFI_API_{x} (\d+)", header)) for x in ("MAJOR", "MINOR"))
        known = major == VERSION[0] and minor >= VERSION[1]
        return known and all(places.items() <= layout(header, struct)[0].items() for struct, places in PLACES.items())
    except ValueError:
        return False


def layout(header: str, struct: str) -> tuple[dict[str, int], int, int]:
    """Where C puts a structure's fields on 64-bit systems: name -> byte, inner structures' too; its size and alignment.

    Raises:
        ValueError: the header does not declare it, or a field has a type that is not understood.
    """
    body = re.sub(r"//[^\n]*", "", _found(rf"struct {struct} \{{(.*?)\n\}}", header))
    body = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"void* \1", body)
    places: dict[str, int] = {}
    end, alignment = 0, 1
    for declaration in filter(None, (" ".join(part.split()) for part in body.split(";"))):
        kind, name = _found(r"^(.*?[ *])\w+$", declaration).strip(), declaration.split()[-1].lstrip("*")
        inner, size, align = _kind(header, kind)
        start = -(-end // align) * align
        places |= {name: start} | {f"{name}.{field}": start + place for field, place in inner.items()}
        end, alignment = start + size, max(alignment, align)
    return places, -(-end // alignment) * alignment, alignment


def _kind(header: str, kind: str) -> tuple[dict[str, int], int, int]:
    """The fields, size and alignment of a C type."""
    kind = kind.removeprefix("const ").removeprefix("struct ")
    if kind.endswith("*") or kind in ("size_t", "int64_t", "uint64_t"):
        return {}, 8, 8
    if kind in ("int", "int32_t", "uint32_t") or re.search(rf"typedef enum \{{[^}}]*\}} {kind};", header):
        return {}, 4, 4
    if renamed := re.search(rf"typedef (\w+) {kind};", header):
        return _kind(header, renamed[1])
    return layout(header, kind)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.DOTALL)
    if match is None:
        raise ValueError(f"there is no {pattern}")
    return match[1]
