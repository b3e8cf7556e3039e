"""Kernels of a dynamic vocabulary: who is named, who is forgotten, who gets a row, who waits.

They work on the buckets that a host holds, one after another; the place of a bucket is its number among them. A row is
`place * rows_per_bucket + position`. What they change is derived: the maps, `occupied`, `hints` and what is known of
waiting keys. Columns of the table are written by `touch` alone, after the table was told. All decisions are those of
`embedding.vocabulary`, in its order.

Common arguments:
  maps: `lines, small` as of `kernels.key_map`, and its lines a bucket.
  occupied: uint8 `[num_rows]`: 0 free, 1 has a key, 2 got it in this step.
  hints: int32 `[num_places]`, no free row has a lower position.
  fills: int32 `[num_places]`, how many rows have a key.
  keys, last, counts: int64, int32, uint32 `[num_rows]`, columns of the table. `last` is the step + 1, 0 where there is
    no key, and less for steps before the run began.
  now: the step + 1.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.key_map import WORDS, find_key, hash_of, home_line, insert_key, remove_key
from podembed.embedding.kernels.row_vectors import inlined, jit, prefetch_item

# Numba compiles a kernel anew when its own file has changed, not when `key_map` has. So this counts the forms of a map.
_MAP_FORM = 2
NEVER, LEAST_RECENT, LEAST_FREQUENT, SMALL_NORM = range(4)
"""Which key of a full bucket goes first."""
MOST_COUNT = (1 << 32) - 1
# How many rows before its turn a row is prefetched.
_AHEAD = 16


@inlined
def _count_unknown(key, hashed, occurrences, slots, unknown, came, sizes):
    """Counts a key that has no row. Returns its number."""
    last_slot = np.uint64(slots.shape[0] - 1)
    slot = (np.uint64(hashed) >> np.uint64(8)) & last_slot
    while slots[slot, 1] and slots[slot, 0] != key:
        slot = (slot + np.uint64(1)) & last_slot
    if not slots[slot, 1]:
        unknown[sizes[1]], came[sizes[1]] = key, 0
        sizes[1] += 1
        slots[slot, 0], slots[slot, 1] = key, sizes[1]
    number = slots[slot, 1] - 1
    came[number] += occurrences
    return number


@jit
def look_up(
    keys,
    times,
    out,
    is_training,
    places,
    rows_per_bucket,
    maps,
    marks,
    touched,
    seen,
    slots,
    unknown,
    came,
    sizes,
    chunk,
):
    """Finds the rows of one array of keys.

    Args:
      keys: int32 or int64 `[n]`.
      times: int64 `[n]`, occurrences of each; empty for one each.
      out: int32 or int64 `[n]`, may begin where `keys` begins: the row of each; -2 - u for the u-th unknown key.
      is_training: whether rows that are found are listed.
      places: int32 `[num_buckets]`, -1 for a bucket that is not held here.
      marks: int32 `[num_rows]`, zero before the first call of a step: the number of a listed row + 1.
      touched, seen: int64, for the listed rows and their occurrences.
      slots: int64 `[a power of two, 2]`, at least half of it free, zero before the first call of a step.
      unknown, came: int64, for the keys without a row, and their occurrences.
      sizes: int64 `[2]`: how many rows are listed and how many keys are unknown.
      chunk: int64 `[2, n]`, scratch.

    Returns:
      Number of the first key whose bucket is not held here; -1 if all are.
    """
    lines, small, per_bucket = maps
    mask = np.uint64(places.shape[0] - 1)
    flat = lines.reshape(-1)
    hashes, found = chunk[0], chunk[1]
    # Some ids at a time, so that what one looks for is on its way while the others are looked for.
    for begin in range(0, keys.shape[0], chunk.shape[1]):
        count = min(chunk.shape[1], keys.shape[0] - begin)
        for j in range(count):
            hashed = hash_of(np.int64(keys[begin + j]))
            place = np.int64(places[hashed & mask])
            if place < 0:
                return begin + j
            hashes[j], found[j] = np.int64(hashed), place
            prefetch_item(flat, (place * per_bucket + home_line(hashed, per_bucket)) * WORDS)
        for j in range(count):
            place = found[j]
            position = find_key(lines, small, place * per_bucket, per_bucket, np.uint64(hashes[j]), keys[begin + j])
            found[j] = -1 if position < 0 else place * rows_per_bucket + position
            if is_training and position >= 0:
                prefetch_item(marks, found[j])
        for j in range(count):
            at, row = begin + j, found[j]
            occurrences = times[at] if times.shape[0] else np.int64(1)
            if row < 0:
                row = -2 - _count_unknown(np.int64(keys[at]), hashes[j], occurrences, slots, unknown, came, sizes)
            elif is_training:
                number = marks[row]
                if number == 0:
                    touched[sizes[0]], seen[sizes[0]] = row, occurrences
                    sizes[0] += 1
                    marks[row] = sizes[0]
                else:
                    seen[number - 1] += occurrences
            found[j] = row
        # Last, since rows of 32 bits may go where keys of 64 bits lie.
        for j in range(count):
            out[begin + j] = found[j]
    return -1


@jit
def fill_unknown(out, rows):
    """Replaces -2 - u by the row of the u-th unknown key."""
    for j in range(out.shape[0]):
        if out[j] < -1:
            out[j] = rows[-2 - np.int64(out[j])]


@jit
def clear_slots(slots, unknown):
    """Empties `slots` again, of the keys that are there."""
    last_slot = np.uint64(slots.shape[0] - 1)
    for u in range(unknown.shape[0]):
        slot = (hash_of(unknown[u]) >> np.uint64(8)) & last_slot
        while slots[slot, 1]:
            slots[slot, 0] = slots[slot, 1] = 0
            slot = (slot + np.uint64(1)) & last_slot


@jit
def touch(touched, seen, now, marks, last, counts):
    """Writes when rows were named last, and how often they were named."""
    for at in range(touched.shape[0]):
        ahead = touched[min(at + _AHEAD, touched.shape[0] - 1)]
        prefetch_item(last, ahead)
        prefetch_item(counts, ahead)
        row = touched[at]
        marks[row] = 0
        last[row] = now
        counts[row] = min(np.int64(counts[row]) + seen[at], MOST_COUNT)


@inlined
def _forget(row, place, position, maps, occupied, hints, fills, keys):
    lines, small, per_bucket = maps
    key = keys[row]
    remove_key(lines, small, place * per_bucket, per_bucket, hash_of(key), key)
    occupied[row] = 0
    hints[place] = min(hints[place], position)
    fills[place] -= 1


@jit
def sweep(due, now, most_idle, rows_per_bucket, maps, occupied, hints, fills, keys, last, gone):
    """Forgets the idle keys of some buckets.

    Args:
      due: int64, their places.
      most_idle: steps.
      gone: int64 `[num_rows of the buckets]`, for their rows.

    Returns:
      How many rows lost their key.
    """
    num_gone = 0
    for d in range(due.shape[0]):
        place = due[d]
        for position in range(rows_per_bucket):
            row = place * rows_per_bucket + position
            if occupied[row] and last[row] and now - np.int64(last[row]) > most_idle:
                _forget(row, place, position, maps, occupied, hints, fills, keys)
                gone[num_gone] = row
                num_gone += 1
    return num_gone


@inlined
def _is_before(a, b, key, other_a, other_b, other_key):
    if a != other_a:
        return a < other_a
    if b != other_b:
        return b < other_b
    return key < other_key


@inlined
def _copy_entry(at, source, heap_a, heap_b, heap_keys, heap_rows):
    heap_a[at], heap_b[at] = heap_a[source], heap_b[source]
    heap_keys[at], heap_rows[at] = heap_keys[source], heap_rows[source]


@inlined
def _keep_least(size, most, a, b, key, row, heap_a, heap_b, heap_keys, heap_rows):
    """Offers an entry to a heap of the `most` least ones, the greatest of them on top. Returns its size."""
    if size == most:
        if not _is_before(a, b, key, heap_a[0], heap_b[0], heap_keys[0]):
            return size
        at = 0
        while True:
            child = 2 * at + 1
            if child >= size:
                break
            other = child + 1
            if other < size and _is_before(
                heap_a[child], heap_b[child], heap_keys[child], heap_a[other], heap_b[other], heap_keys[other]
            ):
                child = other
            if not _is_before(a, b, key, heap_a[child], heap_b[child], heap_keys[child]):
                break
            _copy_entry(at, child, heap_a, heap_b, heap_keys, heap_rows)
            at = child
    else:
        at = size
        size += 1
        while at > 0:
            parent = (at - 1) // 2
            if not _is_before(heap_a[parent], heap_b[parent], heap_keys[parent], a, b, key):
                break
            _copy_entry(at, parent, heap_a, heap_b, heap_keys, heap_rows)
            at = parent
    heap_a[at], heap_b[at], heap_keys[at], heap_rows[at] = a, b, key, row
    return size


@inlined
def _score(kind, row, now, half_life, last, counts, rows):
    """What decides, and what decides among equals."""
    if kind == LEAST_RECENT:
        return np.float64(last[row]), np.int64(0)
    if kind == LEAST_FREQUENT:
        halvings = min(63, (now - np.int64(last[row])) // half_life)
        return np.float64(np.int64(counts[row]) >> halvings), np.int64(last[row])
    total = 0.0
    for column in range(rows.shape[1]):
        total += np.float64(rows[row, column]) * np.float64(rows[row, column])
    return np.sqrt(total), np.int64(0)


@jit
def admit(
    order,
    unknown,
    of_place,
    now,
    kind,
    half_life,
    first_position,
    rows_per_bucket,
    maps,
    occupied,
    hints,
    fills,
    keys,
    last,
    counts,
    rows,
    heap,
    found,
    gone,
):
    """Gives rows to keys that ask for one.

    Args:
      order: int64, numbers of unknown keys, bucket by bucket, in the order in which they are taken.
      of_place: int64, by unknown key, the place of its bucket.
      kind, half_life: which keys of a full bucket are forgotten.
      first_position: of the rows that keys may have.
      rows: float32 `[num_rows, dim]`.
      heap: float64, int64, int64, int64 `[most that are forgotten at once]`.
      found: int64, by unknown key, receives its row; is left as it is where there is none.
      gone: int64, for rows that lost their key; some of them have another one already.

    Returns:
      How many lost it.
    """
    lines, small, per_bucket = maps
    heap_a, heap_b, heap_keys, heap_rows = heap
    room, most = rows_per_bucket - first_position, heap_a.shape[0]
    num_gone = 0
    stuck = np.int64(-1)
    for at in range(order.shape[0]):
        u = order[at]
        key, place = unknown[u], of_place[u]
        start = place * rows_per_bucket
        if fills[place] >= room and kind != NEVER and stuck != place:
            size = 0
            for position in range(first_position, rows_per_bucket):
                row = start + position
                # What this step or the one before names stays, since its gradient is on its way.
                if occupied[row] == 1 and np.int64(last[row]) < now - 1:
                    a, b = _score(kind, row, now, half_life, last, counts, rows)
                    size = _keep_least(size, most, a, b, keys[row], row, heap_a, heap_b, heap_keys, heap_rows)
            for h in range(size):
                row = heap_rows[h]
                _forget(row, place, row - start, maps, occupied, hints, fills, keys)
                gone[num_gone] = row
                num_gone += 1
            if size == 0:
                stuck = place
        if fills[place] >= room:
            continue
        position = max(np.int64(hints[place]), first_position)
        while position < rows_per_bucket - 1 and occupied[start + position]:
            position += 1
        hints[place] = position + 1
        row = start + position
        occupied[row] = 2
        fills[place] += 1
        insert_key(lines, small, place * per_bucket, per_bucket, hash_of(key), key, position)
        found[u] = row
    return num_gone


@jit
def settle(rows, occupied):
    """Rows that got their key in this step have it."""
    for at in range(rows.shape[0]):
        if occupied[rows[at]]:
            occupied[rows[at]] = 1


# ---------------------------------------------------------------- waiting keys


@jit
def find_waiting(unknown, of_place, rows_per_bucket, maps, entries):
    """int64 `entries[u]`: the entry of an unknown key that waits already; -1 of one that does not."""
    lines, small, per_bucket = maps
    for u in range(unknown.shape[0]):
        key, place = unknown[u], of_place[u]
        position = find_key(lines, small, place * per_bucket, per_bucket, hash_of(key), key)
        entries[u] = -1 if position < 0 else place * rows_per_bucket + position


@inlined
def _leave(entry, place, position, maps, keys, last, hints, fills):
    lines, small, per_bucket = maps
    remove_key(lines, small, place * per_bucket, per_bucket, hash_of(keys[entry]), keys[entry])
    last[entry] = 0
    hints[place] = min(hints[place], position)
    fills[place] -= 1


@jit
def sweep_waiting(due, now, most_idle, rows_per_bucket, maps, keys, last, hints, fills, changed):
    """As `sweep`, of waiting keys; `last` is 0 where no key waits."""
    count = 0
    for d in range(due.shape[0]):
        place = due[d]
        for position in range(rows_per_bucket):
            entry = place * rows_per_bucket + position
            if last[entry] and now - np.int64(last[entry]) > most_idle:
                _leave(entry, place, position, maps, keys, last, hints, fills)
                changed[count] = entry
                count += 1
    return count


@jit
def leave(entries, rows_per_bucket, maps, keys, last, hints, fills):
    """These keys have a row now."""
    for at in range(entries.shape[0]):
        entry = entries[at]
        place = entry // rows_per_bucket
        _leave(entry, place, entry - place * rows_per_bucket, maps, keys, last, hints, fills)


@inlined
def _least_waiting(own, unknown, totals, entries, start, most, surplus, now, keys, last, counts, heap):
    """Puts the least (count, last step, key) of a bucket's entries and of the new keys of `own` into the heap, as many
    as are too many: entries, and -1 - u for the u-th unknown key.
    """
    heap_a, heap_b, heap_keys, heap_rows = heap
    size = 0
    for entry in range(start, start + most):
        if last[entry]:
            a, b = np.float64(counts[entry]), np.int64(last[entry])
            size = _keep_least(size, surplus, a, b, keys[entry], entry, heap_a, heap_b, heap_keys, heap_rows)
    for at in range(own.shape[0]):
        u = own[at]
        if entries[u] == -1:
            a = np.float64(min(totals[u], MOST_COUNT))
            size = _keep_least(size, surplus, a, now, unknown[u], -1 - u, heap_a, heap_b, heap_keys, heap_rows)
    return size


@jit
def wait(
    order,
    unknown,
    of_place,
    totals,
    entries,
    now,
    most,
    rows_per_bucket,
    maps,
    keys,
    last,
    counts,
    hints,
    fills,
    heap,
    changed,
):
    """Keys that got no row wait, and the least of a bucket with too many stop waiting.

    Args:
      order: int64, numbers of unknown keys, bucket by bucket.
      totals: int64, by unknown key, its occurrences so far.
      entries: as `find_waiting` has them.
      most: entries of a bucket.
      heap: as of `admit`, with room for all new keys of a bucket.
      changed: int64, for entries that changed; may name one twice.

    Returns:
      How many entries it names.
    """
    lines, small, per_bucket = maps
    heap_rows = heap[3]
    num_changed = 0
    begin = 0
    while begin < order.shape[0]:
        place = of_place[order[begin]]
        start = place * rows_per_bucket
        end, num_new = begin, 0
        while end < order.shape[0] and of_place[order[end]] == place:
            u = order[end]
            if entries[u] >= 0:
                entry = entries[u]
                last[entry], counts[entry] = now, min(totals[u], MOST_COUNT)
                changed[num_changed] = entry
                num_changed += 1
            else:
                num_new += 1
            end += 1
        # Of the present and the new ones together, as many as are too many: the least (count, last step, key).
        surplus = fills[place] + num_new - most
        size = 0
        if surplus > 0:
            own = order[begin:end]
            size = _least_waiting(own, unknown, totals, entries, start, most, surplus, now, keys, last, counts, heap)
        for h in range(size):
            if heap_rows[h] >= 0:
                entry = heap_rows[h]
                _leave(entry, place, entry - start, maps, keys, last, hints, fills)
                changed[num_changed] = entry
                num_changed += 1
            else:
                entries[-1 - heap_rows[h]] = -2
        for at in range(begin, end):
            u = order[at]
            if entries[u] != -1:
                continue
            position = np.int64(hints[place])
            while position < most - 1 and last[start + position]:
                position += 1
            hints[place] = position + 1
            entry = start + position
            keys[entry], last[entry], counts[entry] = unknown[u], now, min(totals[u], MOST_COUNT)
            fills[place] += 1
            insert_key(lines, small, place * per_bucket, per_bucket, hash_of(unknown[u]), unknown[u], position)
            changed[num_changed] = entry
            num_changed += 1
        begin = end
    return num_changed
