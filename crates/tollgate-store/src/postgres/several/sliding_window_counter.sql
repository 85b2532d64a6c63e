select s.place, s.charge, s.key, s.limit_name, s.is_shadow, s.is_new, s.now_us, charged.allowed,
       charged.next_start_us as next_a, charged.next_prev as next_b, charged.next_cur as next_c, charged.next_window_us as next_d,
       null::bigint as next_e, null::bigint as next_f, charged.next_older as next_extra,
       greatest(2 * charged.next_window_us,
                charged.next_older[2] + 2 * charged.next_older[1] - charged.next_start_us) as next_tail_us,
       null::bigint[] as next_log_us, null::bigint[] as next_log_sums,
       array[s.a, s.b, s.c, coalesce(s.d, 0), coalesce(s.extra[1], 0), coalesce(s.extra[2], 0), coalesce(s.extra[3], 0),
             coalesce(s.extra[4], 0)] as reading
from seen as s, lateral (
       select c.*
       from {prefix}sliding_window_counter_charge(
         s.d, s.a, s.b, s.c, s.extra, s.n1, s.n2, s.price_us, s.now_us) as c offset 0) as charged
where s.is_simple and s.strategy = {number}
