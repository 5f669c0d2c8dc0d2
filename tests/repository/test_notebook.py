"""What a deserializer shows of itself: one line, a table for Jupyter, typed records; all from the index alone."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import torch

import tensorizer
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer._format.table import tensors_table


class Table(HTMLParser):
    """Texts of the cells, row by row, and every tag with its attributes."""

    def __init__(self, html):
        super().__init__()
        self.tables, self.rows, self.tags, self.data = [], [], [], None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.rows.append([])
            self.tables[-1].append(self.rows[-1])
        self.data = "" if tag in ("td", "th") else None

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append(self.data)
            self.data = None

    def handle_data(self, data):
        if self.data is not None:
            self.data += data


def write(path, state_dict):
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(state_dict)
    return path


def test_the_table_shows_what_differs_between_tensors_without_loading(tmp_path):
    path = write(tmp_path / "a.tensors", {"a": {"w": torch.ones(3, 1024, dtype=torch.bfloat16), "i": torch.arange(2)}})
    with TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
        before = deserializer.total_bytes_read
        dtypes, rows = Table(deserializer._repr_html_()).tables
        assert deserializer.total_bytes_read == before
        assert rows == [
            ["name ⇅", "dtype ⇅", "shape ⇅", "size ⇅"],
            ["a / i", "int64", "[2]", "16 bytes"],
            ["a / w", "bfloat16", "[3, 1024]", "6.1 KB"],
        ]
        assert dtypes[1:] == [["bfloat16", "1", "6.1 KB"], ["int64", "1", "16 bytes"]]
        deserializer.tree(("a", "i"))
        _, rows = Table(deserializer._repr_html_()).tables
        assert rows[2][4] == "–"
        assert re.fullmatch(r"CRC32:[0-9a-f]{8} SHA256:[0-9a-f]{8}", rows[1][4])


def test_totals_are_by_dtype_and_by_layer_in_the_order_in_which_people_count(tmp_path):
    state = {f"model.layers.{i}.{name}": torch.ones(250) for i in range(12) for name in "ab"}
    path = write(tmp_path / "a.tensors", {"embed": torch.ones(250, dtype=torch.float16), **state})
    for shown in (TensorDeserializer(path, device="cpu", lazy_load=True), tensorizer.inspect(path)):
        dtypes, layers, rows = Table(shown._repr_html_()).tables
        assert dtypes[1:] == [["float16", "1", "500 bytes"], ["float32", "24", "24.0 KB"]]
        assert [row[0] for row in layers[1:]] == ["embed", *(f"model.layers.{i}" for i in range(12))]
        assert layers[-1] == ["model.layers.11", "2", "2.0 KB"]
        assert [row[0] for row in rows[1:6]] == [
            "embed", "model.layers.0.a", "model.layers.0.b", "model.layers.1.a", "model.layers.1.b"
        ]  # fmt: skip


def test_a_long_table_is_folded_and_a_short_one_is_open(tmp_path):
    for number, is_open in ((3, True), (300, False)):
        path = write(tmp_path / f"{number}.tensors", {f"t{i}": torch.ones(1) for i in range(number)})
        tags = Table(tensorizer.inspect(path)._repr_html_()).tags
        *_, details = [attributes for tag, attributes in tags if tag == "details"]
        assert ("open" in details) == is_open


def test_reports_say_in_one_short_line_what_was_found(tmp_path):
    state = {f"layers.{i}": torch.ones(100) for i in range(300)}
    a, b = write(tmp_path / "a.tensors", state), write(tmp_path / "b.tensors", {**state, "new": torch.ones(1)})
    texts = [repr(found) for found in (tensorizer.inspect(a), tensorizer.verify(a), tensorizer.diff(a, b))]
    assert all(len(text) < 300 and "\n" not in text for text in texts), texts
    assert "300 tensors" in texts[0]
    assert "ok: 300 verified" in texts[1]
    assert "0 removed, 1 added, 0 changed, 300 equal" in texts[2]


def test_one_line_says_what_the_object_is(tmp_path):
    path = write(tmp_path / "a.tensors", {"a": torch.ones(300)})
    with TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
        text = repr(deserializer)
    assert "\n" not in text
    assert "1 tensor, 1.2 KB" in text
    assert "cpu" in text


def test_hostile_names_stay_text(tmp_path):
    name = "<script>alert(1)</script>\" onmouseover='x' & <b>"
    path = write(tmp_path / "a.tensors", {name: torch.ones(1)})
    table = Table(TensorDeserializer(path, device="cpu")._repr_html_())
    assert table.tables[-1][1][0] == name
    assert {tag for tag, _ in table.tags} == {
        "div", "p", "code", "details", "summary", "table", "thead", "tbody", "tr", "th", "td"
    }  # fmt: skip
    assert all("onmouseover" not in attributes for _, attributes in table.tags)


def test_a_large_file_gives_a_table_of_bounded_size(tmp_path):
    path = write(tmp_path / "a.tensors", {f"t{i}": torch.ones(1) for i in range(700)})
    html = TensorDeserializer(path, device="cpu", lazy_load=True)._repr_html_()
    assert len(Table(html).tables[-1]) == 501
    assert "and 200 more tensors" in html


def test_columns_carry_values_to_sort_by(tmp_path):
    path = write(tmp_path / "a.tensors", {"big": torch.ones(3000), "small": torch.ones(2)})
    table = Table(TensorDeserializer(path, device="cpu", lazy_load=True)._repr_html_())
    assert all("sort" in attributes["onclick"] for tag, attributes in table.tags if tag == "th")
    values = [attributes["data-v"] for tag, attributes in table.tags if tag == "td"]
    assert values[-6:] == ["big", "[3000]", "12000", "small", "[2]", "8"]


def test_tensors_without_data_are_shown_too(tmp_path):
    state = {"meta": torch.empty(4, 2, dtype=torch.bfloat16, device="meta"), "empty": torch.empty(0, 3)}
    path = write(tmp_path / "a.tensors", state)
    *_, rows = Table(TensorDeserializer(path, device="cpu", lazy_load=True)._repr_html_()).tables
    assert [row[2:] for row in rows[1:]] == [["[0, 3]", "0 bytes"], ["[4, 2]", "16 bytes"]]


def test_no_entries_is_an_empty_table():
    assert Table(tensors_table("nothing", [])).tables[-1] == [["name ⇅", "shape ⇅", "size ⇅"]]


def test_a_report_of_a_load_is_a_table_of_what_did_not_fit(tmp_path):
    hostile = "<script>alert(1)</script>"
    model = torch.nn.Linear(2, 2)
    file = write(tmp_path / "a.tensors", {"weight": torch.ones(2, 2), hostile: torch.ones(1)})
    report = tensorizer.torch.load_model(model, file, strict=False)
    table = Table(report._repr_html_())
    assert [row[0] for row in table.rows] == ["loaded", "missing", "unexpected"]
    assert table.rows[0][1].startswith("1 tensor, 16 bytes in ")
    assert [row[1] for row in table.rows[1:]] == ["bias", hostile]
    assert {tag for tag, _ in table.tags} == {"div", "p", "code", "table", "tbody", "tr", "td"}
    many = {f"unexpected{i}x": torch.ones(1) for i in range(300)}
    report = tensorizer.torch.load_model(model, write(tmp_path / "b.tensors", many), strict=False)
    assert "and 200 more" in report._repr_html_()
