"""TensorData: construction, CSR, conversions and invalid input."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.errors import InvalidInput
from tinkex.types import TensorData

CSR: dict[str, Any] = {
    "data": [5, 6, 7],
    "dtype": "int64",
    "shape": [2, 4],
    "sparse_crow_indices": [0, 1, 3],
    "sparse_col_indices": [2, 0, 3],
}


@st.composite
def matrices(draw: st.DrawFn) -> npt.NDArray[Any]:
    """Small matrices of either type, mostly zero."""
    rows, cols = draw(st.integers(0, 6)), draw(st.integers(0, 9))
    cells = st.one_of(st.just(0), st.just(0), st.integers(-(2**40), 2**40))
    numbers = draw(st.lists(cells, min_size=rows * cols, max_size=rows * cols))
    dtype = draw(st.sampled_from([np.int64, np.float32]))
    return np.array(numbers, dtype=dtype).reshape(rows, cols)


def test_positional_construction_and_data() -> None:
    tensor = TensorData([1, 2, 3, 4], "int64", [2, 2])
    assert tensor.data == [1, 2, 3, 4]
    assert tensor.tolist() == [[1, 2], [3, 4]]
    assert tensor.array.dtype == np.int64
    assert not tensor.is_sparse


def test_shape_is_inferred() -> None:
    assert TensorData([1.0, 2.0], "float32").shape == [2]
    assert TensorData(dtype="float32").shape == [0]
    assert TensorData(np.zeros((2, 3)), "float32").shape == [2, 3]


def test_arrays_of_the_right_type_are_not_copied() -> None:
    array = np.arange(4)
    assert TensorData.from_numpy(array).array is array
    assert TensorData(array, "int64").array is array
    assert TensorData(array, "int64", [2, 2]).array.base is array


def test_other_types_are_converted() -> None:
    assert TensorData.from_numpy(np.array([0.5], np.float16)).array.dtype == np.float32
    assert TensorData.from_numpy(np.array([1], np.int8)).array.dtype == np.int64
    assert TensorData.from_numpy(np.array([1.5], ">f4")).data == [1.5]
    assert TensorData(np.array([2.0]), "int64").data == [2]
    assert TensorData([1, True, 0.5], "float32").data == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.complex64, object])
def test_unsupported_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(InvalidInput, match="has no tensor type"):
        TensorData.from_numpy(np.zeros(2, dtype))


@pytest.mark.parametrize("wrong", [[1.0], 1.0, None])
def test_from_numpy_needs_an_array(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="expected a numpy array, got"):
        TensorData.from_numpy(wrong)


@pytest.mark.parametrize("dtype", [None, "float64", "bool"])
def test_unknown_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(InvalidInput, match=f"dtype is {dtype!r}; expected"):
        TensorData([1], dtype)


@pytest.mark.parametrize(
    ("data", "dtype", "message"),
    [
        ([1.5], "int64", r"data\[0\] is 1.5, which int64 cannot hold"),
        ([1, math.nan], "int64", r"data\[1\] is nan"),
        ([2**63], "int64", "9223372036854775808"),
        (np.array([[1.0, 2.5]]), "int64", r"data\[0, 1\] is 2.5"),
        (["1"], "float32", "must be numbers"),
        ([None], "float32", "must be numbers"),
        ([[1], [2, 3]], "float32", "rows of equal length"),
        (np.array(["a"]), "float32", "expected floats or integers"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(data: Any, dtype: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        TensorData(data, dtype)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([3], r"shape \[3\] does not fit 4 numbers"),
        ([2, 3], r"shape \[2, 3\] does not fit 4 numbers"),
        ([], r"shape \[\] does not fit 4 numbers"),
        ([-1], r"shape is \[-1\]; sizes are never negative"),
        ([-1, -4], "never negative"),
        ([4.0], r"shape is \[4.0\]; expected a list of sizes"),
        (4, "shape is 4; expected a list of sizes"),
    ],
)
def test_shape_must_fit(shape: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        TensorData([1, 2, 3, 4], "int64", shape)


def test_empty_shape_is_limited() -> None:
    assert TensorData([], "float32", [0, 5]).to_numpy().shape == (0, 5)
    with pytest.raises(InvalidInput, match="does not fit 0 numbers"):
        TensorData([], "float32", [0, 2**80])


def test_csr_is_densified_with_the_pad_value() -> None:
    tensor = TensorData(**CSR)
    assert tensor.is_sparse
    assert tensor.tolist() == [[0, 0, 5, 0], [6, 0, 0, 7]]
    assert tensor.tolist(-1) == [[-1, -1, 5, -1], [6, -1, -1, 7]]
    assert (tensor.sparse_crow_indices, tensor.sparse_col_indices) == ([0, 1, 3], [2, 0, 3])
    assert tensor.nbytes == 8 * (3 + 3 + 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse_col_indices": None}, "sparse_col_indices is missing"),
        ({"sparse_crow_indices": None}, "sparse_crow_indices is missing"),
        ({"shape": None}, r"needs a shape of rows and columns, got \[3\]"),
        ({"shape": [8]}, r"needs a shape of rows and columns, got \[8\]"),
        ({"shape": [3, 4]}, "has 3 entries; 3 rows need 4"),
        ({"sparse_col_indices": [2, 0]}, "has 2 entries for 3 numbers"),
        ({"sparse_crow_indices": [0, 1, 2]}, r"must rise from 0 to 3, got \[0, 1, 2\]"),
        ({"sparse_crow_indices": [1, 1, 3]}, "must rise from 0 to 3"),
        ({"sparse_crow_indices": [0, 4, 3]}, "must rise from 0 to 3"),
        (
            {"sparse_crow_indices": [0, -(2**63), 2**63 - 1, 3], "shape": [3, 4]},
            "must rise from 0 to 3",
        ),
        ({"sparse_col_indices": [2, 0, 4]}, "has 4; columns go from 0 to 3"),
        ({"sparse_col_indices": [2, -1, 3]}, "has -1; columns go from 0 to 3"),
    ],
)
def test_invalid_csr_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        TensorData(**{**CSR, **change})


@settings(deadline=None)
@given(matrix=matrices(), pad=st.integers(-2, 2))
def test_csr_round_trip_equals_dense(matrix: npt.NDArray[Any], pad: int) -> None:
    tensor = TensorData.from_numpy_sparse(matrix, pad)
    assert np.array_equal(tensor.to_numpy(pad), matrix)
    assert TensorData.from_wire(tensor.to_wire()) == tensor
    rows, cols = matrix.shape
    nnz = np.count_nonzero(matrix != pad)
    assert tensor.is_sparse == (rows + 1 + 2 * nnz < rows * cols)


@pytest.mark.parametrize("pad", [0.0, True, "0", None])
def test_pad_value_must_be_an_integer(pad: Any) -> None:
    with pytest.raises(InvalidInput, match="expected an integer"):
        TensorData(**CSR).to_numpy(pad)
    with pytest.raises(InvalidInput, match="expected an integer"):
        TensorData.from_numpy_sparse(np.zeros((3, 3)), pad)


def test_read_only_memory_is_copied_for_callers() -> None:
    array = np.frombuffer(b"\x00\x00\x80\x3f", np.float32)
    tensor = TensorData.from_numpy(array)
    assert tensor.array is array
    outside = tensor.to_numpy()
    outside[0] = 2
    assert tensor.data == [1.0]


def test_equality_is_by_value() -> None:
    assert TensorData([1.0, math.nan], "float32") == TensorData([1.0, math.nan], "float32")
    assert TensorData([1], "int64") != TensorData([1], "float32")
    assert TensorData([1, 2], "int64") != TensorData([1, 2], "int64", [1, 2])
    assert TensorData(**CSR) == TensorData(**CSR)
    assert TensorData(**CSR) != TensorData(**{**CSR, "sparse_col_indices": [1, 0, 3]})
    assert TensorData([1], "int64") != [1]


@pytest.mark.parametrize("tensor", [TensorData([[1.5]], "float32"), TensorData(**CSR)])
def test_tensors_can_be_pickled_and_copied(tensor: TensorData) -> None:
    assert pickle.loads(pickle.dumps(tensor)) == tensor
    assert copy.copy(tensor) == copy.deepcopy(tensor) == tensor


def test_tensors_are_frozen_and_not_hashable() -> None:
    tensor = TensorData([1], "int64")
    with pytest.raises(AttributeError, match="frozen"):
        tensor.dtype = "float32"
    with pytest.raises(AttributeError, match="frozen"):
        del tensor.shape
    with pytest.raises(TypeError, match="unhashable"):
        hash(tensor)


def test_repr_is_short() -> None:
    assert repr(TensorData(np.zeros(10_000), "float32")) == (
        "TensorData(dtype='float32', shape=[10000])"
    )
    assert repr(TensorData(**CSR)).endswith("shape=[2, 4], CSR)")


def test_null_on_the_wire_is_nan() -> None:
    tensor = TensorData.from_wire({"data": [1, None], "dtype": "float32", "shape": [2]})
    assert tensor.find_not_finite() is not None
    assert tensor == TensorData([1, math.nan], "float32")


@pytest.mark.parametrize("wrong", [None, 5, {}, {"data": [1]}])
def test_wire_form_is_an_object_with_a_dtype(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="read from an object with a dtype"):
        TensorData.from_wire(wrong)


def test_first_non_finite_number_is_reported_at_dense_position() -> None:
    assert TensorData([1.0, 2.0], "float32").find_not_finite() is None
    assert TensorData([[0.0, math.inf]], "float32").find_not_finite() == ("[0, 1]", math.inf)
    csr = {**CSR, "dtype": "float32", "data": [1.0, 2.0, -math.inf]}
    assert TensorData(**csr).find_not_finite() == ("[1, 3]", -math.inf)
