"""Training data: records, templates and masks, packing, and the position in it."""

from spillway.data.batches import Batches, DataPosition
from spillway.data.encode import Encoded, Sample, encode_files
from spillway.data.records import Record, data_files, read_records

__all__ = ["Batches", "DataPosition", "Encoded", "Record", "Sample", "data_files", "encode_files", "read_records"]
