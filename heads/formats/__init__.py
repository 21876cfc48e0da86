"""Other projects' checkpoints in and out, one file per project; importing this package makes their formats known."""

from selfspec.heads.formats import dflash as dflash
from selfspec.heads.formats import eagle as eagle
from selfspec.heads.formats import eagle3 as eagle3
from selfspec.heads.formats import hydra as hydra
from selfspec.heads.formats import medusa as medusa
from selfspec.heads.formats import speculators as speculators
from selfspec.heads.formats.base import Format as Format
from selfspec.heads.formats.base import format_named as format_named
from selfspec.heads.formats.base import formats as formats
from selfspec.heads.formats.convert import FILES as FILES
from selfspec.heads.formats.convert import Report as Report
from selfspec.heads.formats.convert import config_of as config_of
from selfspec.heads.formats.convert import describe as describe
from selfspec.heads.formats.convert import export_head as export_head
from selfspec.heads.formats.convert import exports as exports
from selfspec.heads.formats.convert import import_folder as import_folder
from selfspec.heads.formats.convert import import_head as import_head
from selfspec.heads.formats.convert import is_foreign as is_foreign
