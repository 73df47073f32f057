"""Pack a dataset: convert arrays, tables, images or text to shards."""

from paceline.data.pack.request import PackRequest as PackRequest
from paceline.data.pack.samples import pack_samples as pack_samples
from paceline.data.pack.write import pack as pack
