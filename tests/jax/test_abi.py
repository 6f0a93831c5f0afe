"""Our declarations of XLA's FFI interface against the header that the installed jaxlib brings, and what is exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from world import later, ran, run_python

jax = later("jax")


ROOT = Path(__file__).resolve().parent.parent.parent

# ours, XLA's, {our member: XLA's member}
STRUCTS: list[tuple[str, str, dict[str, str]]] = [
    ("Extension", "XLA_FFI_Extension_Base", {"struct_size": "", "type": "", "next": ""}),
    (
        "ApiVersion",
        "XLA_FFI_Api_Version",
        {"struct_size": "", "extension_start": "", "major_version": "", "minor_version": ""},
    ),
    ("Buffer", "XLA_FFI_Buffer", {"struct_size": "", "dtype": "", "data": "", "rank": "", "dims": ""}),
    ("ByteSpan", "XLA_FFI_ByteSpan", {"data": "ptr", "size": "len"}),
    ("Scalar", "XLA_FFI_Scalar", {"dtype": "", "value": ""}),
    ("Arguments", "XLA_FFI_Args", {"struct_size": "", "size": "", "types": "", "values": "args"}),
    ("Arguments", "XLA_FFI_Rets", {"struct_size": "", "size": "", "types": "", "values": "rets"}),
    (
        "Attributes",
        "XLA_FFI_Attrs",
        {"struct_size": "", "size": "", "types": "", "names": "", "values": "attrs"},
    ),
    (
        "CallFrame",
        "XLA_FFI_CallFrame",
        {
            "struct_size": "",
            "extension_start": "",
            "api": "",
            "context": "ctx",
            "stage": "",
            "arguments": "args",
            "results": "rets",
            "attributes": "attrs",
            "future": "",
        },
    ),
    ("ErrorCreateArgs", "XLA_FFI_Error_Create_Args", {"struct_size": "", "message": "", "code": "errc"}),
    ("ErrorDestroyArgs", "XLA_FFI_Error_Destroy_Args", {"struct_size": "", "error": ""}),
    ("FutureCreateArgs", "XLA_FFI_Future_Create_Args", {"struct_size": "", "future": ""}),
    ("FutureArgs", "XLA_FFI_Future_SetAvailable_Args", {"struct_size": "", "future": ""}),
    ("FutureErrorArgs", "XLA_FFI_Future_SetError_Args", {"struct_size": "", "future": "", "error": ""}),
    ("TypeId", "XLA_FFI_TypeId", {"type_id": ""}),
    ("TypeInfo", "XLA_FFI_TypeInfo", {"struct_size": "", "deleter": ""}),
    (
        "StateSetArgs",
        "XLA_FFI_State_Set_Args",
        {"struct_size": "", "context": "ctx", "stage": "", "type_id": "", "state": ""},
    ),
    (
        "StateGetArgs",
        "XLA_FFI_State_Get_Args",
        {"struct_size": "", "context": "ctx", "stage": "", "type_id": "", "state": ""},
    ),
    ("StreamGetArgs", "XLA_FFI_Stream_Get_Args", {"struct_size": "", "context": "ctx", "stream": ""}),
    (
        "DeviceOrdinalGetArgs",
        "XLA_FFI_DeviceOrdinal_Get_Args",
        {"struct_size": "", "context": "ctx", "device_ordinal": ""},
    ),
    (
        "Metadata",
        "XLA_FFI_Metadata",
        {"struct_size": "", "api_version": "", "traits": "", "state_type_id": ""},
    ),
    ("MetadataExtension", "XLA_FFI_Metadata_Extension", {"base": "extension_base", "metadata": ""}),
    (
        "Api",
        "XLA_FFI_Api",
        {
            "struct_size": "",
            "version": "api_version",
            "error_create": "XLA_FFI_Error_Create",
            "error_destroy": "XLA_FFI_Error_Destroy",
            "state_set": "XLA_FFI_State_Set",
            "state_get": "XLA_FFI_State_Get",
            "future_create": "XLA_FFI_Future_Create",
            "future_set_available": "XLA_FFI_Future_SetAvailable",
            "future_set_error": "XLA_FFI_Future_SetError",
            "stream_get": "XLA_FFI_Stream_Get",
            "device_ordinal_get": "XLA_FFI_DeviceOrdinal_Get",
        },
    ),
]
VALUES = {
    "int(hc::xla::DataType::kPred)": "XLA_FFI_DataType_PRED",
    "int(hc::xla::DataType::kS8)": "XLA_FFI_DataType_S8",
    "int(hc::xla::DataType::kS16)": "XLA_FFI_DataType_S16",
    "int(hc::xla::DataType::kS32)": "XLA_FFI_DataType_S32",
    "int(hc::xla::DataType::kS64)": "XLA_FFI_DataType_S64",
    "int(hc::xla::DataType::kU8)": "XLA_FFI_DataType_U8",
    "int(hc::xla::DataType::kU16)": "XLA_FFI_DataType_U16",
    "int(hc::xla::DataType::kU32)": "XLA_FFI_DataType_U32",
    "int(hc::xla::DataType::kU64)": "XLA_FFI_DataType_U64",
    "int(hc::xla::DataType::kF16)": "XLA_FFI_DataType_F16",
    "int(hc::xla::DataType::kBF16)": "XLA_FFI_DataType_BF16",
    "int(hc::xla::DataType::kF32)": "XLA_FFI_DataType_F32",
    "int(hc::xla::DataType::kF64)": "XLA_FFI_DataType_F64",
    "int(hc::xla::DataType::kC64)": "XLA_FFI_DataType_C64",
    "int(hc::xla::DataType::kC128)": "XLA_FFI_DataType_C128",
    "int(hc::xla::DataType::kF8E5M2)": "XLA_FFI_DataType_F8E5M2",
    "int(hc::xla::DataType::kF8E4M3FN)": "XLA_FFI_DataType_F8E4M3FN",
    "int(hc::xla::DataType::kF8E4M3B11FNUZ)": "XLA_FFI_DataType_F8E4M3B11FNUZ",
    "int(hc::xla::DataType::kF8E5M2FNUZ)": "XLA_FFI_DataType_F8E5M2FNUZ",
    "int(hc::xla::DataType::kF8E4M3FNUZ)": "XLA_FFI_DataType_F8E4M3FNUZ",
    "int(hc::xla::DataType::kF8E4M3)": "XLA_FFI_DataType_F8E4M3",
    "int(hc::xla::DataType::kF8E3M4)": "XLA_FFI_DataType_F8E3M4",
    "int(hc::xla::DataType::kF8E8M0FNU)": "XLA_FFI_DataType_F8E8M0FNU",
    "int(hc::xla::ErrorCode::kInvalidArgument)": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "int(hc::xla::ErrorCode::kUnavailable)": "XLA_FFI_Error_Code_UNAVAILABLE",
    "int(hc::xla::Stage::kInstantiate)": "XLA_FFI_ExecutionStage_INSTANTIATE",
    "int(hc::xla::Stage::kExecute)": "XLA_FFI_ExecutionStage_EXECUTE",
    "int(hc::xla::AttributeType::kScalar)": "XLA_FFI_AttrType_SCALAR",
    "int(hc::xla::AttributeType::kString)": "XLA_FFI_AttrType_STRING",
    "hc::xla::kMetadataExtension": "XLA_FFI_Extension_Metadata",
    "hc::xla::kBufferArgument": "XLA_FFI_RetType_BUFFER",
    "hc::xla::kApiMajor": "XLA_FFI_API_MAJOR",
    "offsetof(hc::xla::CallFrame, future)": "XLA_FFI_CallFrame_STRUCT_SIZE",
    "offsetof(hc::xla::FutureCreateArgs, future)": "XLA_FFI_Future_Create_Args_STRUCT_SIZE",
    "sizeof(hc::xla::TypeInfo)": "XLA_FFI_TypeInfo_STRUCT_SIZE",
    "sizeof(hc::xla::StateGetArgs)": "XLA_FFI_State_Get_Args_STRUCT_SIZE",
    "sizeof(hc::xla::StreamGetArgs)": "XLA_FFI_Stream_Get_Args_STRUCT_SIZE",
    "hc::xla::kDeviceOrdinalGetArgsSize": "XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE",
    "sizeof(hc::xla::ApiVersion)": "XLA_FFI_Api_Version_STRUCT_SIZE",
}

# Version 0.4 (jax 0.11) gave some of it other names; the layout of what we use is the same.
RENAMED = [
    "#if XLA_FFI_API_MINOR >= 4",
    "#define XLA_FFI_Extension_Base XLA_FFI_InternalExtension",
    "#endif",
]


def test_our_declarations_are_those_of_the_installed_jaxlib(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    lines = ['#include "frameworks/xla_ffi.h"', '#include "xla/ffi/api/c_api.h"', *RENAMED]
    for ours, theirs, members in STRUCTS:
        for mine, its in members.items():
            its = its or mine
            lines.append(
                f'static_assert(offsetof(hc::xla::{ours}, {mine}) == offsetof({theirs}, {its}), "{theirs}.{its}");'
            )
    lines += [f'static_assert({ours} == {theirs}, "{theirs}");' for ours, theirs in VALUES.items()]
    source = tmp_path / "abi.cc"
    source.write_text("\n".join(lines) + "\n")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof"]
    includes = [f"-I{ROOT / 'csrc'}", f"-I{jax.ffi.include_dir()}"]
    done = ran(*command, *includes, str(source))
    assert done.returncode == 0, done.stderr


def test_importing_the_binding_starts_no_backend() -> None:
    """So that a script can still choose platforms and devices after its imports."""

    code = (
        "import horoclone.jax, jax._src.xla_bridge as bridge\n"
        "assert not bridge._backends, bridge._backends\n"
        "import jax; jax.config.update('jax_num_cpu_devices', 2); assert len(jax.devices()) == 2"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
