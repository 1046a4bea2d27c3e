"""Arrays with names, against xarray."""

import numpy as np
import pytest
import torch

from birthmark.api.named_array import NamedArray
from birthmark.errors import UsageError

xarray = pytest.importorskip("xarray")

VALUES = np.arange(24.0).reshape(2, 3, 4)
COORDS = {"layer": np.array([1, 2]), "head": np.array([0, 1, 2]), "epsilon": np.array([0.1, 0.2, 0.3, 0.4])}


@pytest.fixture
def array():
    return NamedArray(VALUES, tuple(COORDS), COORDS, "mass", "sink mass", "%")


def same(ours, theirs):
    assert ours.dims == theirs.dims
    np.testing.assert_array_equal(ours.values, theirs.values)
    for dim in ours.dims:
        np.testing.assert_array_equal(ours.coords[dim], theirs.coords[dim].values)


@pytest.mark.parametrize(
    "wanted",
    [
        {}, {"layer": 2}, {"layer": 2, "head": 0}, {"head": [2, 0]}, {"layer": 1, "epsilon": [0.2, 0.4]},
        {"layer": 1, "head": 1, "epsilon": 0.3}, {"head": np.int64(1)},
    ],
    ids=str,
)  # fmt: skip
def test_selecting_by_coordinate_is_xarrays(array, wanted):
    same(array.sel(**wanted), array.to_xarray().sel(**wanted))


@pytest.mark.parametrize("places", [{"layer": -1}, {"head": slice(1, None)}, {"head": [0], "epsilon": 3}], ids=str)
def test_selecting_by_place_is_xarrays(array, places):
    same(array.isel(**places), array.to_xarray().isel(**places))


@pytest.mark.parametrize("dim", [None, "layer", "epsilon"])
def test_reductions_are_xarrays(array, dim):
    same(array.mean(dim), array.to_xarray().mean(dim))
    same(array.max(dim), array.to_xarray().max(dim))


def test_pandas_has_the_coordinates(array):
    assert array.to_pandas()[(2, 1, 0.3)] == VALUES[1, 1, 2]
    frame = array.sel(layer=1).to_pandas()
    assert (frame.index.name, frame.columns.name, frame.loc[2, 0.4]) == ("head", "epsilon", VALUES[0, 2, 3])
    assert array.sel(layer=1, head=0).to_pandas().to_dict() == {0.1: 0, 0.2: 1, 0.3: 2, 0.4: 3}


def test_numpy_takes_it(array):
    assert np.asarray(array).sum() == VALUES.sum()
    assert np.log1p(array).shape == array.shape
    np.testing.assert_array_equal(np.max(array, axis=1), VALUES.max(1))
    assert np.mean(array) == VALUES.mean()
    assert np.stack([array, array]).shape == (2, *VALUES.shape)
    assert float(array.sel(layer=1, head=0, epsilon=0.2)) == 1.0
    assert repr(array).startswith("<NamedArray mass (layer: 2, head: 3, epsilon: 4) in %>")


def test_nan_is_a_coordinate():
    array = NamedArray(VALUES[:, 0, 0], ("dose",), {"dose": np.array([np.nan, 8.0])}, "mass")
    same(array.sel(dose=np.nan), array.to_xarray().sel(dose=np.nan))
    same(array.sel(dose=[8, float("nan")]), array.to_xarray().sel(dose=[8, np.nan]))
    assert float(array.sel(dose=np.float32("nan"))) == VALUES[0, 0, 0]
    with pytest.raises(UsageError, match=r"mass has no dose 2; there are nan, 8\.0"):
        array.sel(dose=2)


def test_a_single_value_is_a_series_of_one(array):
    assert array.sel(layer=2, head=1, epsilon=0.3).to_pandas().tolist() == [VALUES[1, 1, 2]]


def test_what_is_not_there_is_named(array):
    with pytest.raises(UsageError, match="layer: sel takes coordinates, not a slice; give a list of them, or isel"):
        array.sel(layer=slice(1, 2))
    with pytest.raises(UsageError, match="mass has no dimension lay; it has layer, head, epsilon"):
        array.sel(lay=1)
    with pytest.raises(UsageError, match="mass has no layer 3; there are 1, 2"):
        array.sel(layer=3)
    with pytest.raises(UsageError, match="mass has no layer '1'; there are 1, 2"):
        array.sel(layer="1")


@pytest.mark.parametrize("wanted", [True, [True, False], [[1, 2]], {1}, None], ids=repr)
def test_sel_takes_one_coordinate_or_a_list(array, wanted):
    with pytest.raises(UsageError, match=r"layer .*: give a coordinate, or a list of them"):
        array.sel(layer=wanted)


@pytest.mark.parametrize("wanted", [None, 1.0, "1", [[0, 1]], True, [True], 2, [0, -3]], ids=repr)
def test_isel_takes_indices_that_are_there_or_a_mask(array, wanted):
    with pytest.raises(UsageError, match=r"layer .*: (give an index|there are 2; give|a mask has an entry)"):
        array.isel(layer=wanted)


def test_tensors_tuples_and_masks_select_as_lists_do(array):
    for places in ((1, 0), torch.tensor([1, 0])):
        same(array.isel(layer=places), array.isel(layer=[1, 0]).to_xarray())
    same(array.isel(layer=[False, True]), array.to_xarray().isel(layer=[1]))
    same(array.sel(layer=torch.tensor([2])), array.to_xarray().sel(layer=[2]))
