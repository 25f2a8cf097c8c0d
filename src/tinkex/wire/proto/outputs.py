"""Protobuf codec of ForwardBackwardOutput."""

from __future__ import annotations

from itertools import groupby

from tinkex.types.tensors import TensorData
from tinkex.types.training import ForwardBackwardOutput, LossFnOutput
from tinkex.wire.proto.protobuf import (
    DOUBLE_VALUE,
    LEN,
    MESSAGE_VALUE,
    VARINT,
    MessageWriter,
    WireError,
    make_tag,
    read_fields,
    read_map_entry,
    to_double,
    to_int64,
    to_text,
    write_double_value,
)
from tinkex.wire.proto.tensors import read_column, write_column

# ForwardBackwardOutput
OUTPUT_TYPE = make_tag(1, LEN)
RECORDS = make_tag(2, LEN)
METRICS = make_tag(3, LEN)
# ArrayRecord
TYPE_TAG = make_tag(1, LEN)
FIELDS = make_tag(2, LEN)
NUM_DATUMS = make_tag(3, VARINT)

DEFAULT_OUTPUT_TYPE = "ArrayRecord"
#: Limit of datums in records without fields, which need no bytes per datum.
MAX_BARE_DATUMS = 1 << 20


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """Encode a result; consecutive datums that differ only in length share a record."""
    message = MessageWriter()
    message.text(OUTPUT_TYPE, output.loss_fn_output_type)
    for _, run in groupby(output.loss_fn_outputs, _record_key):
        message.message(RECORDS, _write_record, (output.loss_fn_output_type, list(run)))
    message.entries(METRICS, write_double_value, output.metrics)
    return message.to_bytes()


def _record_key(datum: LossFnOutput) -> list[tuple[str, str, list[int]]]:
    """Return the properties that the datums of one record share."""
    return sorted((name, tensor.dtype, tensor.shape[1:]) for name, tensor in datum.items())


def _write_record(record: MessageWriter, content: tuple[str, list[LossFnOutput]]) -> None:
    type_tag, datums = content
    record.text(TYPE_TAG, type_tag)
    columns = {name: [datum[name] for datum in datums] for name in datums[0]}
    record.entries(FIELDS, _write_column, columns)
    record.number(NUM_DATUMS, len(datums))


def _write_column(entry: MessageWriter, tensors: list[TensorData]) -> None:
    entry.message(MESSAGE_VALUE, write_column, tensors)


def decode_forward_backward_output(data: bytes) -> ForwardBackwardOutput:
    """Decode a result; tensors of one field and record share their memory."""
    output_type, metrics = "", dict[str, float]()
    outputs: list[LossFnOutput] = []
    num_bare_datums = 0
    for tag_, _, payload in read_fields(memoryview(data)):
        if tag_ == OUTPUT_TYPE:
            output_type = to_text(payload)
        elif tag_ == METRICS:
            name, value = read_map_entry(payload, DOUBLE_VALUE)
            metrics[name] = to_double(value)
        elif tag_ == RECORDS:
            columns, num_datums = _read_record(payload)
            num_bare_datums += 0 if columns else num_datums
            if num_bare_datums > MAX_BARE_DATUMS:
                raise WireError(
                    f"a result claims {num_bare_datums} datums and says nothing of them"
                )
            outputs += _columns_to_datums(columns, num_datums)
    return ForwardBackwardOutput(
        loss_fn_output_type=output_type.rpartition(":")[2] or DEFAULT_OUTPUT_TYPE,
        loss_fn_outputs=outputs,
        metrics=metrics,
    )


def _read_record(data: memoryview) -> tuple[dict[str, list[TensorData]], int]:
    columns: dict[str, list[TensorData]] = {}
    num_datums = 0
    for tag_, number, payload in read_fields(data):
        if tag_ == FIELDS:
            name, column = read_map_entry(payload, MESSAGE_VALUE)
            columns[name] = read_column(column, f"{name!r:.80}")
        elif tag_ == NUM_DATUMS:
            num_datums = to_int64(number)
    if num_datums < 0:
        raise WireError(f"a record claims {num_datums} datums")
    # Older servers do not send the count; it is the length of the columns.
    return columns, num_datums or max(map(len, columns.values()), default=0)


def _columns_to_datums(columns: dict[str, list[TensorData]], num_datums: int) -> list[LossFnOutput]:
    """Convert columns to datums; surplus rows are ignored, missing rows are an error."""
    for name, column in columns.items():
        if len(column) < num_datums:
            raise WireError(f"{name!r:.80} has {len(column)} rows for {num_datums} datums")
    return [
        {name: column[index] for name, column in columns.items()} for index in range(num_datums)
    ]
