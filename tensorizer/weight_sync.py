"""New weights for live models: :class:`WeightPublisher` publishes them, :class:`WeightFollower` puts them in place.

``docs/weight-sync.md`` describes the files in the store, the costs and the limits.
"""

from tensorizer._sync.follower import Applied as Applied
from tensorizer._sync.follower import WeightFollower as WeightFollower
from tensorizer._sync.publisher import Published as Published
from tensorizer._sync.publisher import WeightPublisher as WeightPublisher
from tensorizer.errors import ConflictError as ConflictError
from tensorizer.errors import StateMismatchError as StateMismatchError

__all__ = ["WeightFollower", "WeightPublisher"]
