select s.place, s.charge, s.key, s.limit_name, s.is_shadow, s.is_new, s.now_us, charged.allowed,
       charged.next_newest_us as next_a, charged.next_total as next_b, charged.next_entries as next_c, charged.next_oldest_us as next_d,
       null::bigint as next_e, null::bigint as next_f, null::bigint[] as next_extra, charged.next_keep_us as next_tail_us,
       charged.next_us as next_log_us, charged.next_sums as next_log_sums,
       {prefix}short_log_reading(
         s.a, s.b, s.log_us, s.log_sums, s.n1, s.n2, s.price_us, false, {prefix}sliding_window_now(s.a, s.now_us)) as reading
from seen as s, lateral {prefix}short_log_charge(
       s.a, s.b, s.c, s.d, s.tail_us, s.log_us, s.log_sums, s.n1, s.n2, s.price_us, s.now_us) as charged
where s.is_simple and s.strategy = {number}
