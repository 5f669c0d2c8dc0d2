"""What a deserializer shows of itself: one line, a table for Jupyter, typed records; all from the index alone."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import torch

from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer._format.table import entries_table


class Table(HTMLParser):
    """Texts of the cells, row by row, and every tag with its attributes."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.tags, self.data = [], [], None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
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


def test_the_table_shows_name_kind_dtype_shape_size_and_hashes_without_loading(tmp_path):
    path = write(tmp_path / "a.tensors", {"a": {"w": torch.ones(3, 1024, dtype=torch.bfloat16), "i": torch.arange(2)}})
    with TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
        before = deserializer.total_bytes_read
        rows = Table(deserializer._repr_html_()).rows
        assert deserializer.total_bytes_read == before
        assert rows[1:] == [
            ["a / w", "state dict", "bfloat16", "[3, 1024]", "6.0 KiB", "–"],
            ["a / i", "state dict", "int64", "[2]", "16.0 bytes", "–"],
        ]
        deserializer.tree(("a", "i"))
        rows = Table(deserializer._repr_html_()).rows
        assert rows[1][5] == "–"
        assert re.fullmatch(r"CRC32:[0-9a-f]{8} SHA256:[0-9a-f]{8}", rows[2][5])


def test_one_line_says_what_the_object_is(tmp_path):
    path = write(tmp_path / "a.tensors", {"a": torch.ones(300)})
    with TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
        text = repr(deserializer)
    assert "\n" not in text
    assert "1 tensors" in text
    assert "1,200 bytes" in text
    assert "cpu" in text


def test_hostile_names_stay_text(tmp_path):
    name = "<script>alert(1)</script>\" onmouseover='x' & <b>"
    path = write(tmp_path / "a.tensors", {name: torch.ones(1)})
    table = Table(TensorDeserializer(path, device="cpu")._repr_html_())
    assert table.rows[1][0] == name
    assert {tag for tag, _ in table.tags} == {"div", "p", "code", "table", "thead", "tbody", "tr", "th", "td"}
    assert all("onmouseover" not in attributes for _, attributes in table.tags)


def test_a_large_file_gives_a_table_of_bounded_size(tmp_path):
    path = write(tmp_path / "a.tensors", {f"t{i}": torch.ones(1) for i in range(700)})
    html = TensorDeserializer(path, device="cpu", lazy_load=True)._repr_html_()
    assert len(Table(html).rows) == 501
    assert "and 200 more tensors" in html


def test_columns_carry_values_to_sort_by(tmp_path):
    path = write(tmp_path / "a.tensors", {"big": torch.ones(3000), "small": torch.ones(2)})
    table = Table(TensorDeserializer(path, device="cpu")._repr_html_())
    assert all("sort" in attributes["onclick"] for tag, attributes in table.tags if tag == "th")
    sizes = [attributes["data-v"] for tag, attributes in table.tags if tag == "td"][4::6]
    assert sizes == ["12000", "8"]


def test_tensors_without_data_are_shown_too(tmp_path):
    state = {"meta": torch.empty(4, 2, dtype=torch.bfloat16, device="meta"), "empty": torch.empty(0, 3)}
    path = write(tmp_path / "a.tensors", state)
    rows = Table(TensorDeserializer(path, device="cpu", lazy_load=True)._repr_html_()).rows
    assert rows[1][3:5] == ["[4, 2]", "16.0 bytes"]
    assert rows[2][3:5] == ["[0, 3]", "0.0 bytes"]


def test_no_entries_is_an_empty_table():
    assert len(Table(entries_table("nothing", [])).rows) == 1


def test_a_report_of_a_load_is_a_table_of_what_did_not_fit(tmp_path):
    import tensorizer

    hostile = "<script>alert(1)</script>"
    model = torch.nn.Linear(2, 2)
    file = write(tmp_path / "a.tensors", {"weight": torch.ones(2, 2), hostile: torch.ones(1)})
    report = tensorizer.load_model(model, file, strict=False)
    table = Table(report._repr_html_())
    assert [row[0] for row in table.rows] == ["loaded", "missing", "unexpected"]
    assert table.rows[0][1].startswith("1 tensors, 16 bytes in ")
    assert [row[1] for row in table.rows[1:]] == ["bias", hostile]
    assert {tag for tag, _ in table.tags} == {"div", "p", "code", "table", "tbody", "tr", "td"}
    many = {f"unexpected{i}x": torch.ones(1) for i in range(300)}
    report = tensorizer.load_model(model, write(tmp_path / "b.tensors", many), strict=False)
    assert "and 200 more" in report._repr_html_()
