select s.place, s.charge, s.key, s.limit_name, s.is_shadow, s.is_new, s.now_us, charged.allowed,
       charged.next_end_us as next_a, charged.next_count as next_b, 0::bigint as next_c, charged.next_start_us as next_d,
       null::bigint as next_e, null::bigint as next_f, null::bigint[] as next_extra, 0::bigint as next_tail_us,
       null::bigint[] as next_log_us, null::bigint[] as next_log_sums,
       array[s.a, s.b, greatest(coalesce(s.d, s.a - s.n2), 0)] as reading
from seen as s, lateral (
       select c.* from {prefix}fixed_window_charge(s.a, s.b, s.d, s.n1, s.n2, s.n3, s.price_us, s.now_us) as c offset 0) as charged
where s.is_simple and s.strategy = {number}
